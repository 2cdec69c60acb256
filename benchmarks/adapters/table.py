"""Which programs are measured, in which modes, and how pip installs each into an environment of its own.

Versions are pinned: a comparison names what it compared. ``{torch}`` becomes the version of the PyTorch that is here,
which every environment shares, so that no peer brings another one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """``pip`` are the arguments of successive `pip install`s; without any, it runs where the benchmark runs.
    ``int8`` and ``int4`` say what these mean for its target; ``refused``, why it is measured in fp32 alone.
    ``draft_precision`` is what its draft is stored in beside any target. ``sampled`` is a remark on its speculation at
    temperature 1."""

    name: str
    modes: tuple[str, ...]
    pip: tuple[tuple[str, ...], ...] = ()
    int8: str = ""
    int4: str = ""
    refused: str = ""
    draft_precision: str = "fp32"
    sampled: str = ""

    @property
    def adapter(self) -> str:
        return f"peer_{self.name}.py"

    def stored(self, precision: str) -> str:
        """What ``precision`` means for its target: of fp32 there is nothing to say."""
        return {"int8": self.int8, "int4": self.int4}.get(precision, "")


GENAI = "onnxruntime-genai==0.18.0"
OPTIMUM_INTEL = ("optimum==2.3.0", "huggingface-hub<1.22", "requests>=2.33", "setuptools")  # the rest of what it names
REFERENCE = ("leadout", "auto")

PEERS = (
    Peer(
        "leadout",
        ("auto", "model", "plain"),
        int8="weights a channel, activations a row, both 8 bit",
        int4="weights in blocks of 32, 8-bit activations",
    ),
    Peer(
        "genai",
        ("plain", "draft", "draft-adaptive", "ngram"),
        (("--no-deps", GENAI),),
        int8="its builder's -p int8: weights in blocks of 32, 8-bit activations",
        int4="its builder's -p int4: weights in blocks of 32, 8-bit activations",
        draft_precision="int8",
    ),
    Peer(
        "openvino",
        ("plain", "draft", "draft-dynamic", "lookup"),
        (
            ("torch=={torch}", "openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4", *OPTIMUM_INTEL),
            ("--no-deps", "optimum-intel==2.2.0"),  # it names torchvision, which would bring another torch
        ),
        int8="optimum-cli's --weight-format int8, all else its default",
        int4="optimum-cli's --weight-format int4 in groups of 32, as everywhere here; all else its default",
        draft_precision="int8",
        sampled="as its sources read, sampled speculation with a draft model does not keep the target's law",
    ),
    Peer(
        "transformers", ("plain", "draft", "lookup"), refused="its weights of few bits need a further package on a CPU"
    ),
    Peer(
        "llama",
        ("plain", "lookup"),
        (("llama-cpp-python==0.3.36", "gguf==0.19.0"),),
        int8="Q8_0",
        int4="Q4_0, the head too",
    ),
)
