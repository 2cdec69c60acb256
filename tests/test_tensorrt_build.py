"""Engines, built ahead of time with TensorRT-RTX: no GPU is needed, and none of them runs here. What is checked is
what the parser made of each graph, what was written, and that the dangerous forms are caught."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from support_graphs import Shape, graph, write

from leadout.bundle import Bundle, Manifest, ModelEntry, dump, file_entry
from leadout.engines.tensorrt import compat
from leadout.engines.tensorrt.manifest import Profile, find, read
from leadout.engines.tensorrt.manifest import dump as dump_manifest
from leadout.errors import EngineError, ExportError, UsageError
from leadout.export.graphs.passes import pack, simplify, to_nonpad
from leadout.export.tensorrt import network
from leadout.export.tensorrt.build import Sizes, build_engines, write_graph
from leadout.export.tensorrt.graph import fix_capacity, lower
from leadout.export.tensorrt.network import attention_layers, check_import, check_log, parse, unscale_keys
from leadout.scripts.cli import main

RTX = "tensorrt-rtx"
C = Shape(vocab=48)
SIZES = Sizes(max_batch=3, max_draft=5, max_prefill=32, capacity=64, top=7)


def bundle(folder: Path, precision: str = "fp32", **roles: Shape) -> Bundle:
    """A bundle without texts of these decoders."""
    shapes = roles or {"target": C}
    return sealed(folder, {role: write(shape, folder / role, precision).entry for role, shape in shapes.items()})


def sealed(folder: Path, entries: dict[str, ModelEntry]) -> Bundle:
    """Write the manifest for the graphs as they lie there."""
    models = {}
    for role, model in entries.items():
        variants = {name: file_entry(folder / role / entry.file) for name, entry in model.variants.items()}
        blob = {"model.onnx.data": file_entry(folder / role / "model.onnx.data")}
        models[role] = dataclasses.replace(model, directory=role, variants=variants, files=blob)
    manifest = Manifest(format=1, leadout="test", models=models, files={}, sampling={}, provenance={})
    (folder / "leadout.json").write_text(dump(manifest), encoding="utf-8")
    return Bundle.read(folder)


PARSERS: list[Any] = []  # they own the weights of their networks


def parsed(path: Path) -> tuple[Any, Any, Any]:
    """The SDK, the network and the log of the graph at ``path``; the network keeps its builder alive."""
    trt, logger = compat.sdk(RTX), compat.logger(RTX)
    logger.lines.clear()
    network = trt.Builder(logger).create_network(compat.network_flags(RTX))
    PARSERS.append(parse(trt, network, logger, path))
    return trt, network, logger


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int4"])
def test_every_precision_builds_for_every_device_named(precision: str, tmp_path: Path) -> None:
    found = bundle(tmp_path)
    lines: list[str] = []
    capabilities = ["86", "120", "portable"] if precision == "fp16" else ["89"]
    paths = build_engines(
        found, RTX, precision=precision, sizes=SIZES, capabilities=capabilities, progress=lines.append
    )
    assert [path.name for path in paths] == [f"{RTX}-{sm}-{precision}.engine" for sm in capabilities]
    canonical = found.model("target").entry.variants["canonical"].sha256
    for path in paths:
        manifest = read(path.with_suffix(".json"))
        assert manifest.name == path.stem and manifest.version == compat.version(RTX)
        assert manifest.profiles == (Profile(max_batch=3, max_width=32), Profile(max_batch=3, max_width=6))
        assert (manifest.capacity, manifest.top, manifest.graph_sha256) == (64, 7, canonical)
        names = [f"{i}.{kind}" for i in range(C.layers) for kind in ("key", "value")]
        assert manifest.aliases == {f"present.{name}": f"past_key_values.{name}" for name in names}
        assert set(manifest.heads) == {"greedy", "logsumexp", "top_ids", "top_logits"}
        blob = path.read_bytes()
        assert (len(blob), hashlib.sha256(blob).hexdigest()) == (manifest.engine_bytes, manifest.engine_sha256)
    assert lines[0] == f"target: lowering to {precision}, 64 slots a row" and "target: building, sm" in "".join(lines)
    others = found.model("target").entry.variants.keys() - {"canonical"}
    assert {path.name for path in (tmp_path / "target").iterdir()} == {
        "model.onnx", "model.onnx.data", *(f"model.{name}.onnx" for name in others),
        *(path.name for path in paths), *(f"{path.stem}.json" for path in paths),
    }, "nothing else is left behind"  # fmt: skip
    assert Bundle.read(tmp_path) == found, "the bundle itself is as it was"


def test_a_pair_is_built_with_one_command_and_found_again(tmp_path: Path) -> None:
    found = bundle(tmp_path, target=C, draft=Shape(vocab=48, layers=1, windows=(None,)))
    build_engines(found, RTX, sizes=SIZES, capabilities=["86"])
    for role in ("target", "draft"):
        path, manifest = find(found.model(role), RTX, compat.version(RTX), "86")
        assert path.parent.name == role and manifest.precision == "fp16"


def test_a_device_has_the_engine_that_was_built_last(tmp_path: Path) -> None:
    found, said = bundle(tmp_path), list[str]()
    build_engines(found, RTX, sizes=SIZES, capabilities=["86", "89"])
    build_engines(found, RTX, precision="int4", sizes=SIZES, capabilities=["86"], progress=said.append)
    assert find(found.model("target"), RTX, compat.version(RTX), "86")[1].precision == "int4"
    assert {path.name for path in (tmp_path / "target").glob(f"{RTX}*")} == {
        f"{RTX}-{name}.{kind}" for name in ("86-int4", "89-fp16") for kind in ("engine", "json")
    }
    assert f"target: {RTX}-86-int4 replaces {RTX}-86-fp16" in said


def test_heads_no_fused_kernel_takes_are_decomposed_and_the_manifest_says_so(tmp_path: Path) -> None:
    wide = Shape(vocab=48, layers=1, heads=1, kv_heads=1, head_dim=512, rotary=512, windows=(None,))
    (path,) = build_engines(bundle(tmp_path, target=wide), RTX, sizes=SIZES, capabilities=["86"])
    assert "attention is decomposed" in "".join(read(path.with_suffix(".json")).log)


def test_the_keys_are_read_where_they_lie(tmp_path: Path) -> None:
    path, _, _ = write_graph(bundle(tmp_path).model("target"), tmp_path, "fp16", SIZES)
    trt, network, _ = parsed(path)
    assert unscale_keys(trt, network) == C.layers
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    keys = {layer.get_input(1).name for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT}
    assert keys == {"present.0.key", "present.1.key"}


def test_the_network_holds_the_weights_of_the_graph(tmp_path: Path) -> None:
    path, made, _ = write_graph(bundle(tmp_path).model("target"), tmp_path, "fp16", SIZES)
    trt, network, _ = parsed(path)
    found = []
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            found.append(layer.weights)
    for tensor in (v.const_value.numpy() for v in made.graph.initializers.values() if v.const_value.size > 1000):
        assert any(tensor.size == w.size and np.array_equal(tensor.ravel(), w.ravel()) for w in found)


def test_a_model_of_less_context_gets_the_slots_it_can_use(tmp_path: Path) -> None:
    found = bundle(tmp_path, target=C, draft=Shape(vocab=48, context=64))
    sizes, models = Sizes(capacity=200, max_prefill=150), [found.model("target"), found.model("draft")]
    sizes.check(models)  # as the target's engine says that it was built
    assert [(sizes.slots(model), sizes.prefill(model)) for model in models] == [(200, 150), (72, 72)]


def test_a_scale_that_is_not_folded_shows(tmp_path: Path) -> None:
    model = ir.load(write(C, tmp_path).path("canonical"))
    fix_capacity(model, 64)
    ir.save(model, tmp_path / "scaled.onnx", external_data="scaled.onnx.data")
    trt, network, _ = parsed(tmp_path / "scaled.onnx")
    assert unscale_keys(trt, network) == 0


@pytest.mark.parametrize("fused", [True, False], ids=["as shipped", "standard operators"])
def test_the_variant_with_lengths_for_masks_is_caught(fused: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """``nonpad_kv_seqlen`` with ``is_causal``: it parses and builds, and would answer wrongly without a word."""
    if not fused:
        monkeypatch.setattr("leadout.export.graphs.gqa.fuse_skip_norm", lambda model: 0)
    model = graph(C)
    simplify(model, C.context)
    pack(model)
    assert to_nonpad(model) == C.layers
    lower(model, "fp16", 64, 7)
    ir.save(model, tmp_path / "nonpad.onnx", external_data="nonpad.onnx.data")
    trt, network, logger = parsed(tmp_path / "nonpad.onnx")
    with pytest.raises(EngineError, match="the parser left out the mask"):
        check_import(trt, network, logger, layers=C.layers, attentions=C.layers)


def small(folder: Path, inputs: list[Any], nodes: list[Any], output: Any) -> Path:
    made = helper.make_graph(nodes, "small", inputs, [output])
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    (folder / "small.onnx").write_bytes(proto.SerializeToString())
    return folder / "small.onnx"


def value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT16) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


QKV = [value("q", "B", 2, "S", 16), value("k", "B", 2, 64, 16), value("v", "B", 2, 64, 16)]
OUT = value("y", "B", 2, "S", 16)


def test_an_input_the_parser_drops_is_caught(tmp_path: Path) -> None:
    lengths = value("lengths", "B", kind=TensorProto.INT64)
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["y"], scale=1.0, is_causal=1)
    trt, network, logger = parsed(small(tmp_path, [*QKV, lengths], [node], OUT))
    with pytest.raises(EngineError, match="dropped lengths"):
        check_import(trt, network, logger, layers=0, attentions=1)


def test_a_causal_kind_and_key_value_lengths_are_caught(tmp_path: Path) -> None:
    mask = value("mask", "B", 1, "S", 64, kind=TensorProto.BOOL)
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], scale=1.0)
    path = small(tmp_path, [*QKV, mask], [node], OUT)
    trt, network, logger = parsed(path)
    assert check_import(trt, network, logger, layers=0, attentions=1) == {}
    with pytest.raises(EngineError, match="has 2 Attention nodes, the parser made 1"):
        check_import(trt, network, logger, layers=0, attentions=2)
    with pytest.raises(EngineError, match=r"present\.0\.key: the caches updated in place"):
        check_import(trt, network, logger, layers=1, attentions=1)
    (attention,) = attention_layers(trt, network).values()
    attention.key_value_lengths = network.add_input("lengths", trt.int32, (-1,))
    with pytest.raises(EngineError, match="key-value lengths"):
        check_import(trt, network, logger, layers=0, attentions=1)


def test_what_the_sdk_reports_of_a_graph_fails_the_build() -> None:
    logger = compat.logger(RTX)
    logger.lines[:] = [("WARNING", "WARNING all is well")]
    check_log(logger)
    logger.lines[:] = [("ERROR", "no such thing")]
    with pytest.raises(EngineError, match="the SDK reports: no such thing"):
        check_log(logger)


def test_another_logger_in_the_process_is_refused(tmp_path: Path) -> None:
    """The SDK reports to the first logger it was given: a build would not see its own errors."""
    program = (
        "import sys, tensorrt_rtx as trt\n"
        "first = trt.Builder(trt.Logger())\n"
        "from leadout.scripts.cli import main\n"
        "main(['build', sys.argv[1], '--sdk', 'tensorrt-rtx', '--capacity', '64'])\n"
    )
    bundle(tmp_path)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 5 and "build in a process of its own" in done.stderr


def test_bundles_that_cannot_be_built_name_the_export_that_can(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"target is in int8.*leadout export .*--precision fp32"):
        build_engines(bundle(tmp_path / "int8", "int8"), RTX)
    with pytest.raises(ExportError, match="in fp16 and can be built in fp16 only; for bf16 export"):
        build_engines(bundle(tmp_path / "fp16", "fp16"), RTX, precision="bf16")
    entry = bundle(tmp_path / "fp32").model("target").entry
    imported = dataclasses.replace(entry, dialect="concat", variants={"canonical": entry.variants["canonical"]})
    foreign = sealed(tmp_path / "fp32", {"target": imported})
    with pytest.raises(ExportError, match=r"target was imported \('concat'\).*leadout export TARGET"):
        build_engines(foreign, RTX)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max-batch must be from 1 to 4096, not 0"),
        ({"max_batch": 10**12}, "max-batch must be from 1 to 4096, not 1000000000000"),
        ({"max_draft": 0}, "max-draft must be from 1 to 64, not 0"),
        ({"max_draft": 65}, "max-draft must be from 1 to 64, not 65"),
        ({"top": 0}, "top must be from 1 to 3840, not 0"),
        ({"top": 3841}, "top must be from 1 to 3840, not 3841"),
        ({"capacity": 17}, "capacity must be from 18 .* to 328 slots .*, not 17"),
        ({"capacity": 329}, "capacity must be from 18 .* to 328 slots .*, not 329"),
        ({"max_prefill": 8}, "max-prefill must be from 9 .* to 328 .*, not 8"),
        ({"max_prefill": 65, "capacity": 64}, "max-prefill must be from 9 .* to 64 .*, not 65"),
    ],
)
def test_sizes_outside_their_range_are_refused(options: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        build_engines(bundle(tmp_path), RTX, sizes=Sizes(**options))


def test_devices_and_precisions_no_sdk_knows_are_refused(tmp_path: Path) -> None:
    found = bundle(tmp_path)
    with pytest.raises(UsageError, match=r"builds for no sm '90' .*86, 89, 120.*portable"):
        build_engines(found, RTX, capabilities=["90"])
    with pytest.raises(UsageError, match=r"'fp8' is unknown \(one of: fp32, fp16, bf16, int4\)"):
        build_engines(found, RTX, precision="fp8")


@pytest.mark.parametrize(
    ("sdk", "options", "message"),
    [
        (RTX, {"capabilities": ["86", "8.9"]}, r"without its dot \(86, 120\) or portable, not '8.9'"),
        (RTX, {"capabilities": [""]}, "sm must be .*, not ''"),
        ("tensorrt", {"capabilities": ["86"]}, "takes no --sm; tensorrt-rtx does"),
        (RTX, {"capabilities": ["90"], "sizes": Sizes(max_draft=65)}, "max-draft must be from 1 to 64, not 65"),
    ],
)
def test_what_no_sdk_could_build_is_refused_without_one(
    sdk: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, compat.SDKS[sdk], None)
    with pytest.raises(UsageError, match=message):
        build_engines(bundle(tmp_path), sdk, **options)


def test_native_tensorrt_without_itself_or_a_gpu_ends_in_one_line(tmp_path: Path) -> None:
    bundle(tmp_path)
    program = "from leadout.scripts.cli import main; main()"
    command = [sys.executable, "-c", program, "build", str(tmp_path), "--sdk", "tensorrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5 and done.stdout == "" and done.stderr.count("\n") == 1
    missing = "pip install 'leadout[tensorrt]'", "no NVIDIA driver here", "no CUDA device 0"
    assert any(reason in done.stderr for reason in missing)


def test_building_needs_no_pytorch() -> None:
    program = (
        "import leadout.export.tensorrt.build, sys\nprint({'torch', 'transformers', 'onnxruntime'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_machine_without_a_driver_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr(compat, "_DRIVER", "libcuda-that-is-not-here.so.1")
    with pytest.raises(EngineError, match=r"no NVIDIA driver here \(libcuda-that-is-not-here\.so\.1 is missing\)"):
        compat.compute_capability()


def test_a_device_that_the_environment_hides_is_asked_for_by_its_name(monkeypatch: Any) -> None:
    """nvidia-smi, which does not look there, sees it all the same."""
    monkeypatch.setattr(compat.ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: 100))
    hidden = r"no CUDA device 0 \(driver error 100\): does nvidia-smi see a GPU that CUDA_VISIBLE_DEVICES does not hide"
    with pytest.raises(EngineError, match=hidden):
        compat.compute_capability()


def test_a_failed_build_leaves_the_earlier_engine_and_no_rubbish(tmp_path: Path) -> None:
    found = bundle(tmp_path)
    build_engines(found, RTX, sizes=SIZES, capabilities=["86"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "target").glob("tensorrt*")}
    capped = graph(C)  # TensorRT's attention has no softcap
    simplify(capped, C.context)
    for n in capped.graph:
        if n.op_type == "Attention":
            n.attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)
    ir.save(capped, tmp_path / "target" / "model.onnx", external_data="model.onnx.data")
    with pytest.raises(EngineError, match=r"target\.onnx does not parse: .*softcap"):
        build_engines(sealed(tmp_path, {"target": found.model("target").entry}), RTX, sizes=SIZES, capabilities=["86"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").glob("tensorrt*")} == before
    assert not list((tmp_path / "target").glob(".*"))


def test_an_interrupt_in_a_callback_of_the_build_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT would drop it, and say that the build was canceled."""
    found = bundle(tmp_path)
    monkeypatch.setattr(network, "_SILENCE", -1.0)

    def interrupts(line: str) -> None:
        if " of " in line:  # a phase of the build
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engines(found, RTX, sizes=SIZES, capabilities=["86"], progress=interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [*(tmp_path / "target").glob("tensorrt*"), *(tmp_path / "target").glob(".*")]


def test_a_bundle_that_takes_no_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, write_bytes = bundle(tmp_path), Path.write_bytes

    def full(path: Path, data: Any) -> int:
        if path.suffix == ".engine":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportError, match=rf"^cannot write engines into '{tmp_path}': No space left on device; "):
        build_engines(found, RTX, sizes=SIZES, capabilities=["86"])
    assert not [*(tmp_path / "target").glob("tensorrt*"), *(tmp_path / "target").glob(".*")]


def test_the_command_prints_the_engines(tmp_path: Path) -> None:
    bundle(tmp_path)
    sizes = ["--max-batch", "2", "--max-draft", "3", "--max-prefill", "16", "--capacity", "48", "--top", "9"]
    done = CliRunner().invoke(main, ["build", str(tmp_path), "--sdk", RTX, "--sm", "86,120", *sizes])
    assert done.exit_code == 0, done.stderr
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.name for path in paths] == [f"{RTX}-{sm}-fp16.engine" for sm in ("86", "120")]
    manifest = read(paths[0].with_suffix(".json"))
    assert manifest.command(tmp_path) == (
        f"leadout build {tmp_path} --sdk {RTX} --precision fp16 --sm 86 "
        "--max-batch 2 --max-draft 3 --max-prefill 16 --capacity 48 --top 9"
    )
    assert "building, sm 120" in done.stderr


@pytest.fixture
def edge(root: Path) -> str:
    """The page for devices."""
    return (root / "docs" / "edge.md").read_text(encoding="utf-8")


@pytest.fixture
def long_bundle(tmp_path: Path) -> Bundle:
    """With the context the page's messages speak of."""
    return bundle(tmp_path / "long", target=Shape(vocab=96, layers=1, windows=(None,), context=1024))


def test_the_commands_of_the_edge_page_exist(edge: str) -> None:
    lines = re.findall(r"^leadout (\w+) (.*)$", "".join(re.findall(r"```bash\n(.*?)```", edge, re.DOTALL)), re.M)
    assert {name for name, _ in lines} == {"export", "plan", "build", "generate"}
    for name, arguments in lines:
        command: click.Command = importlib.import_module(f"leadout.scripts.cmd_{name}").command
        command.make_context(name, shlex.split(arguments, comments=True))


def test_the_edge_page_shows_what_is_really_printed(edge: str, long_bundle: Bundle, tmp_path: Path) -> None:
    bundle(tmp_path / "int8", "int8")
    places = {"INT8_BUNDLE": str(tmp_path / "int8"), "BUNDLE": str(long_bundle.path)}
    (block,) = re.findall(r"```console\n(.*?)```", edge, re.DOTALL)
    shown = re.findall(r"^\$ leadout (.*)\n(leadout: .*)$", block, re.M)
    assert len(shown) == block.count("$ ")
    for arguments, message in shown:
        if arguments.endswith("tensorrt") and importlib.util.find_spec("tensorrt"):
            continue  # what is shown is a machine without it
        done = CliRunner().invoke(main, [places.get(word, word) for word in shlex.split(arguments)])
        assert done.exit_code != 0 and done.stderr.splitlines()[-1] == message


def test_the_edge_page_shows_how_engines_are_refused(edge: str, long_bundle: Bundle) -> None:
    model = long_bundle.model("target")
    (path,) = build_engines(long_bundle, RTX, capabilities=["86"])
    manifest = read(path.with_suffix(".json"))
    manifest = dataclasses.replace(manifest, version="1.7.1.116")
    path.with_suffix(".json").write_text(dump_manifest(manifest), encoding="utf-8")

    def said(version: str, sm: str) -> str:
        with pytest.raises(EngineError) as caught:
            find(model, RTX, version, sm)
        return str(caught.value).replace(str(long_bundle.path), "BUNDLE")

    messages = [said("1.7.1.116", "89"), said("1.8.0", "86")]
    path.write_bytes(b"damaged")
    messages.append(said("1.7.1.116", "86"))
    assert [message for message in messages if f"\n{message}\n" not in edge] == []
