"""Checkpoints in half the width of float32: the same graph, bit for bit, and never the memory of the wide weights."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import onnx_ir as ir  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_export_architectures import tiny  # noqa: E402
from test_mutants import Mutant, must_die  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from leadout.errors import ExportError  # noqa: E402
from leadout.export.build import export_pair  # noqa: E402
from leadout.export.capture import stored  # noqa: E402
from leadout.export.capture.decoder_graph import capture  # noqa: E402
from leadout.export.capture.kept import kept  # noqa: E402
from leadout.export.capture.stored import NARROW, Standins, Stored, keep_stored, narrow_type  # noqa: E402
from leadout.export.checkpoints.checkpoint import Checkpoint, load  # noqa: E402
from leadout.export.golden import compute_truth  # noqa: E402

# Every way there is to hold weights and to reach them: joined, turned round, scaled when looked up, stacked, merged.
KINDS = ("llama", "phi3", "gpt2", "gemma3", "mixtral", "gpt_oss")
# These hold and reach theirs as Llama (joined: as Phi 3) does, in modules of their own: what is read is looked at, and
# what is said of it, without captures, which take time.
LIKE = ("gpt_neox", "opt", "falcon", "cohere")
SINGLE = {"num_hidden_layers": 1}  # of several layers each does the same


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of any size stay as they are stored."""
    monkeypatch.setattr(stored, "LEAST", 1)


def save_both(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[Path, Path]:
    """One tiny model in float32 and in ``dtype``, whose numbers are the same."""
    model, (wide, narrow) = tiny(name, **changes).model, (folder / "wide", folder / "narrow")
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    model.save_pretrained(wide)
    narrow.mkdir()
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(wide / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    for file in wide.glob("*.json"):
        (narrow / file.name).write_bytes(file.read_bytes())
    return wide, narrow


def weights_of(checkpoint: Checkpoint) -> dict[str, Any]:
    graph = capture(checkpoint.model, *kept(checkpoint.model)).graph
    return {name: value.const_value.numpy() for name, value in graph.initializers.items()}


def same_model(folder: Path, name: str, **changes: Any) -> tuple[Checkpoint, Checkpoint, Any]:
    """A checkpoint in half the width says what the one in float32 says: both, and the logits of the narrow one."""
    wide, narrow = map(load, save_both(name, folder, **SINGLE | changes))
    assert not any(isinstance(weight, Stored) for weight in wide.model.parameters())
    assert all(isinstance(weight, Stored) == (weight.dim() > 1) for weight in narrow.model.parameters())
    for ours, theirs in zip(narrow.model.parameters(), wide.model.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs)
    expected, found = compute_truth(wide), compute_truth(narrow)
    assert np.array_equal(expected.tokens, found.tokens)
    assert np.abs(expected.logits - found.logits).max() < 1e-5
    return wide, narrow, found.logits


def same_graph(_patch: pytest.MonkeyPatch, folder: Path, name: str, **changes: Any) -> None:
    """A checkpoint in half the width becomes what the one in float32 becomes, and stays what it is while it does."""
    wide, narrow, logits = same_model(folder, name, **changes)
    ours, theirs = weights_of(narrow), weights_of(wide)
    assert list(ours) == list(theirs)
    for key, array in theirs.items():
        assert ours[key].dtype == array.dtype and np.array_equal(ours[key], array), key
    assert np.array_equal(compute_truth(narrow).logits, logits)


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_architecture_becomes_the_same_graph(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"layer_types": ["sliding_attention"]} if name == "gemma3" else {}
    same_graph(monkeypatch, tmp_path, name, **one)


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("name", LIKE)
def test_architectures_like_these_say_the_same(name: str, tmp_path: Path) -> None:
    same_model(tmp_path, name)


@pytest.mark.usefixtures("small_ones_too")
def test_half_precision_and_tied_tables_are_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_graph(monkeypatch, tmp_path, "llama", dtype=torch.float16, tie_word_embeddings=True)


@pytest.mark.usefixtures("small_ones_too")
def test_one_tensor_in_float32_and_all_are_read_in_it(tmp_path: Path) -> None:
    wide, narrow = save_both("llama", tmp_path)
    tensors = load_file(narrow / "model.safetensors")
    fine = tensors["model.layers.0.mlp.up_proj.weight"].float() * (1 + 2**-20)
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": fine}, narrow / "model.safetensors", {"format": "pt"})
    assert narrow_type([narrow / "model.safetensors"]) is narrow_type([wide / "model.safetensors"]) is None
    model = load(narrow).model
    assert torch.equal(model.get_parameter("model.layers.0.mlp.up_proj.weight"), fine)
    assert not any(isinstance(weight, Stored) for weight in model.parameters())


def test_packed_tensors_say_nothing_of_the_rest(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    packed, rest = torch.zeros(1024, 1024, dtype=torch.uint8), torch.zeros(1024, 1024, dtype=torch.bfloat16)
    for tensors, expected in (({"a": packed, "b": rest}, torch.bfloat16), ({"a": packed}, None), ({}, None)):
        save_file(tensors, place)
        assert narrow_type([place]) is expected


@pytest.mark.parametrize(("kind", "name"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32")])
def test_codes_of_fewer_bits_are_not_taken_for_numbers(kind: torch.dtype, name: str, tmp_path: Path) -> None:
    """transformers casts them, and what comes out is finite: a model of noise."""
    for model, few in (("llama", "down_proj.weight"), ("mixtral", "gate.weight"), ("gpt2", "c_fc.weight")):
        wide, _ = save_both(model, tmp_path / model)
        tensors = load_file(wide / "model.safetensors")
        # what older versions of transformers saved beside them is no weight
        masks = {f"transformer.h.{i}.attn.bias": torch.ones(4, 4, dtype=torch.uint8) for i in range(2)}
        save_file(tensors | (masks if model == "gpt2" else {}), wide / "model.safetensors", metadata={"format": "pt"})
        load(wide)
        codes = {key: (9 * each).to(kind) if key.endswith(few) else each for key, each in tensors.items()}
        save_file(codes, wide / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ExportError, match=rf"its files have integers \({name}\) for .*{few} and 1 more tensors; "):
            load(wide)


def test_codes_in_pytorch_s_own_files_are_none_either(tmp_path: Path) -> None:
    wide, _ = save_both("llama", tmp_path)
    tensors = load_file(wide / "model.safetensors")
    (wide / "model.safetensors").unlink()
    for codes in ({}, {"model.norm.weight": torch.ones(64, dtype=torch.int8)}):
        torch.save(tensors | codes, wide / "pytorch_model.bin")
        with pytest.raises(ExportError, match=r"\(int8\) for model.norm.weight;") if codes else nullcontext():
            load(wide)


def test_parts_of_a_checkpoint_are_all_looked_at(tmp_path: Path, small_ones_too: None) -> None:
    _, narrow = save_both("llama", tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "parts", max_shard_size="100KB"
    )
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    parts, whole = load(tmp_path / "parts").model, load(narrow).model
    assert any(isinstance(weight, Stored) for weight in parts.parameters())
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def lets_go(_patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Experts that a file has one by one are put together in memory, which is free again when nobody needs them."""
    _, narrow = save_both("mixtral", folder)
    checkpoint = load(narrow)
    memory = [weight.untyped_storage() for weight in checkpoint.model.parameters() if isinstance(weight, Stored)]
    own = [storage for storage in memory if storage.resizable()]
    assert len(own) >= 4 and all(storage.nbytes() for storage in own)
    checkpoint.release()
    assert not any(storage.nbytes() for storage in own)


def test_memory_of_its_own_is_free_again(tmp_path: Path, small_ones_too: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lets_go(monkeypatch, tmp_path)


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """How many numbers the largest float32 tensor has that was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                self.found = max(self.found, each.numel())
        return out


def no_more_than_asked(patch: pytest.MonkeyPatch) -> None:
    """What a product, a lookup or one expert reads of a stored weight is widened, and no more; all is exact."""
    patch.setattr("leadout.export.graphs.pieces.PIECE", 1 << 12)
    for dtype in NARROW.values():
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 300).to(dtype)
        experts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(6, 64, 64).to(dtype))])
        table = torch.nn.Embedding(500, 64, _weight=2**-20 * torch.randn(500, 64)).to(dtype)
        model = torch.nn.ModuleList([layer, experts, table]).requires_grad_(False)
        narrow = [weight.detach().clone() for weight in (layer.weight, layer.bias, experts[0], table.weight)]
        keep_stored(model)
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
        rows, ids = torch.randn(3, 5, 64), torch.tensor([[7, 499], [0, 7]])
        with Largest() as made:
            product, one, found = layer(rows), experts[0][2], table(ids)
        assert made.found <= max(1 << 10, 64 * 64, product.numel()) < layer.weight.numel()
        assert type(one) is Stored and type(experts[0][[1, 2]]) is type(found) is torch.Tensor
        weight, bias, stack, every = (each.float() for each in narrow)
        torch.testing.assert_close(product, functional.linear(rows, weight, bias))
        assert torch.equal(one, stack[2]) and torch.equal(found, every[ids])
        # Whatever else is done with it, it is float32 there, too.
        for ours, theirs in ((layer.weight.T @ layer.weight, weight.T @ weight), (1 + layer.weight, 1 + weight)):
            assert ours.dtype == torch.float32 and type(ours) is torch.Tensor and torch.equal(ours, theirs)
        assert torch.equal(torch.addmm(bias[:64], rows[0], experts[0][0]), torch.addmm(bias[:64], rows[0], stack[0]))
        assert type(layer.weight.detach()) is Stored and torch.equal(layer.weight.narrow_form(), narrow[0])


def views_are_known(patch: pytest.MonkeyPatch) -> None:
    """Of two models' weights, a graph has one whole, turned, cut, and turned and cut, and the other; and one of its
    own."""
    patch.setattr(stored, "LEAST", 1)
    weights = [torch.randn(6, 8).bfloat16(), torch.randn(6, 8).bfloat16()]
    model = torch.nn.ParameterList([torch.nn.Parameter(weight, False) for weight in weights])
    keep_stored(model)
    standins, own = Standins(), np.ones((3, 3), np.float32)
    with standins.in_place(model):
        one, two = (weight.numpy() for weight in model)
    wide, other = (weight.float().numpy() for weight in weights)
    views = {"whole": (one, wide), "turned": (one.T, wide.T), "cut": (one[2:, 3:], wide[2:, 3:])}
    views |= {"both": (one[1:5].T, wide[1:5].T), "other": (two, other), "own": (own, own)}
    values = [ir.Value(name=name, const_value=ir.tensor(view)) for name, (view, _) in views.items()]
    filled = ir.Graph([], [], nodes=[], initializers=values)
    standins.fill(filled)
    for name, (_, expected) in views.items():
        found = filled.initializers[name].const_value
        assert isinstance(found, ir.Tensor) == (name == "own"), name
        assert np.array_equal(found.numpy(), expected), name
        assert name == "own" or np.array_equal(found.make(slice(1, 3), slice(2, 4)), expected[1:3, 2:4]), name
    assert all(isinstance(weight, Stored) for weight in model)


def test_weights_of_a_graph_are_known_by_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    views_are_known(monkeypatch)


def test_what_is_read_is_widened_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_than_asked(monkeypatch)


def test_a_bundle_of_it_is_the_same_to_the_byte(tmp_path: Path, tokenizer_file: Path, small_ones_too: None) -> None:
    blobs = []
    for source in save_both("llama", tmp_path, vocab_size=512, num_hidden_layers=1):
        (source / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        bundle = export_pair(source, "self:int4", tmp_path / f"{source.name}.bundle", precision="int8")
        blobs.append([(bundle / role / "model.onnx.data").read_bytes() for role in ("target", "draft")])
    assert blobs[0] == blobs[1]


PEAK = """
import sys, threading, time
from pathlib import Path

from leadout.export import build  # before anything is measured
from leadout.engines.providers import onnxruntime

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.005)

onnxruntime()
peak = [before := anonymous()]
threading.Thread(target=watch, daemon=True).start()
build.export_pair(sys.argv[1], None, sys.argv[2], precision="int8", max_context=64)
print((peak[0] - before) << 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="says how much memory a process has of its own")
def test_an_export_takes_less_memory_than_the_checkpoint(tmp_path: Path, tokenizer_file: Path) -> None:
    """81 M weights, 323 MB in float32, of which an engine in int8 has a copy of its own, of a quarter of that; torch's
    exporter takes 130 MB, of a model of any size."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=5120, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, bos_token_id=None, eos_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    for name, weight in model.named_parameters():
        weight.data.mul_(8 if "embed" in name or "lm_head" in name else 1)
    weights = model.num_parameters()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model"), str(tmp_path / "bundle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1])
    assert peak < 4 * weights, f"{peak / weights:.2f} bytes a weight"


MUTANTS = [
    Mutant("a product widens all of its weight", stored, "_linear", "steps(weight.shape)", "[slice(None)]"),
    Mutant("a standin is filled as it lay", stored, "_view_of", "view[rows, columns]", "narrow.view(array.shape)"),
    Mutant("a cut standin is filled from its start", stored, "_view_of", "offset // array.itemsize", "0"),
    Mutant("only the first weight is found", stored.Standins, "fill", "weight in spans", "weight in spans[:1]"),
    Mutant("models keep their standins", stored.Standins, "in_place", "setattr(module, name, weight)", "pass"),
    Mutant("small vectors are narrow, too", stored, "_is_large", "len(shape) > 1 and", ""),
    Mutant("lookups widen the table", stored.Stored, "__torch_function__", '"embedding", ', ""),
    Mutant("all is widened", stored.Stored, "__torch_function__", '"__getitem__"', '""'),
    Mutant("what is picked is rounded", stored.Stored, "__torch_function__", "found.float()", "found.half().float()"),
    Mutant("experts are widened to be picked", stored, "_is_part", "return", "return False and"),
    Mutant("merged experts stay", Checkpoint, "release", "isinstance(weight, Stored)", "False"),
    Mutant(
        "memory is asked for in float32", stored.Stored, "__torch_function__", "name in _TOLD", "name in ('shape',)"
    ),
    Mutant("a bias is forgotten", stored, "_linear", "made if bias is None else", "made if True else"),
]


def everything(patch: pytest.MonkeyPatch, folder: Path) -> None:
    no_more_than_asked(patch)
    views_are_known(patch)
    (folder / "mixture").mkdir()
    lets_go(patch, folder / "mixture")
    same_graph(patch, folder, "phi3", tie_word_embeddings=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.bug for mutant in MUTANTS])
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda patch: everything(patch, tmp_path)], monkeypatch)
