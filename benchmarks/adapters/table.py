"""Which programs are measured, in which modes, and how pip installs each into an environment of its own.

Versions are pinned: a comparison names what it compared. ``{torch}`` becomes the version of the PyTorch that is here,
which every environment shares, so that no peer brings another one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """``pip`` are the arguments of successive `pip install`s; without any, it runs where the benchmark runs.
    ``eight_bit`` says what int8 means for its target; empty: it is not measured in int8, and ``refused`` says why.
    ``draft_precision`` is what its draft is stored in beside any target. ``sampled`` is a remark on its speculation at
    temperature 1."""

    name: str
    modes: tuple[str, ...]
    pip: tuple[tuple[str, ...], ...] = ()
    eight_bit: str = ""
    refused: str = ""
    draft_precision: str = "fp32"
    sampled: str = ""

    @property
    def adapter(self) -> str:
        return f"peer_{self.name}.py"


GENAI = "onnxruntime-genai==0.18.0"
OPTIMUM_INTEL = ("optimum==2.3.0", "huggingface-hub<1.22", "requests>=2.33", "setuptools")  # the rest of what it names
REFERENCE = ("leadout", "auto")

PEERS = (
    Peer("leadout", ("auto", "model", "plain"), eight_bit="weights a channel, activations a row, both 8 bit"),
    Peer(
        "genai",
        ("plain", "draft", "draft-adaptive", "ngram"),
        (("--no-deps", GENAI),),
        eight_bit="its builder's -p int8: weights in blocks of 32, 8-bit activations",
        draft_precision="int8",
    ),
    Peer(
        "openvino",
        ("plain", "draft", "draft-dynamic", "lookup"),
        (
            ("torch=={torch}", "openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4", *OPTIMUM_INTEL),
            ("--no-deps", "optimum-intel==2.2.0"),  # it names torchvision, which would bring another torch
        ),
        eight_bit="optimum-cli's --weight-format int8, all else its default",
        draft_precision="int8",
        sampled="as its sources read, sampled speculation with a draft model does not keep the target's law",
    ),
    Peer(
        "transformers", ("plain", "draft", "lookup"), refused="its 8-bit CPU weights need a further package (torchao)"
    ),
    Peer(
        "llama",
        ("plain", "lookup"),
        (("llama-cpp-python==0.3.36", "gguf==0.19.0"),),
        eight_bit="Q8_0",
    ),
)
