"""What may be imported where: `import leadout` loads nothing heavy, generating needs no PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXPORT_ONLY = {"torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxscript", "safetensors"}
HEAVY = EXPORT_ONLY | {"onnxruntime", "numpy", "tokenizers", "rich"}

GENERATE = """
import contextlib, io, sys
import leadout
from leadout.scripts.cli import main
bundle = sys.argv[1]
with leadout.load(bundle) as pair:
    for draft in ("auto", "model", "suffix", "recycling", "ngram", "none"):
        assert len(pair.generate("def f(x):", draft=draft, max_new_tokens=6, ignore_eos=True).token_ids) == 6
    assert len(pair.generate(["a = 1", "b"], temperature=1.0, max_new_tokens=6)) == 2
    assert list(pair.stream("def f(x):", max_new_tokens=6))
    assert len(pair.generate("def f(x):", n=3, draft="siblings", temperature=1.0, max_new_tokens=6)) == 3
for command in (["generate", bundle, "-p", "x", "--max-new-tokens", "3"], ["check", bundle], ["inspect", bundle]):
    with contextlib.redirect_stdout(io.StringIO()):
        main(command, standalone_mode=False)
"""


def modules_after(program: str, *args: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after ``program``."""
    program += "\nimport json, sys\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_leadout_loads_nothing_heavy() -> None:
    loaded = modules_after("import leadout\nleadout.UsageError\nassert leadout.__version__")
    assert not loaded & HEAVY
    assert "leadout" in loaded


def test_help_loads_neither_a_runtime_nor_pytorch() -> None:
    program = "from leadout.scripts.cli import main\nmain(['--help'], standalone_mode=False)"
    assert not modules_after(program) & (EXPORT_ONLY | {"onnxruntime", "tokenizers"})


@pytest.mark.slow
def test_the_generating_path_needs_neither_torch_nor_transformers_nor_optimum_nor_onnx(tiny_bundle: Path) -> None:
    loaded = modules_after(GENERATE, str(tiny_bundle))
    assert "onnxruntime" in loaded and not loaded & EXPORT_ONLY
    assert "llguidance" not in loaded, "nobody asked for a grammar"


@pytest.mark.slow
def test_a_grammar_needs_no_more_than_its_own_library(tiny_bundle: Path) -> None:
    loaded = modules_after(GENERATE.replace('"--max-new-tokens", "3"', '"--regex", "a{3}"'), str(tiny_bundle))
    assert "llguidance" in loaded and not loaded & EXPORT_ONLY


def test_folders_import_only_what_they_may(root: Path) -> None:
    """The table of docs/architecture.md, by the text of the imports."""
    forbidden = {
        "runtime": (
            *("torch", "onnxruntime", "tensorrt", "onnx", "transformers"),
            *("..export", "...export", "..scripts", "...scripts"),
        ),
        "engines": ("torch", "transformers", "..runtime", "...runtime", "..export", "...export", "..scripts"),
        "export": ("..runtime", "...runtime", "..scripts", "...scripts"),
        "export/graphs": ("torch", "..capture", "..checkpoints", "..drafts"),
        "export/capture": ("..checkpoints", "..drafts"),
        "export/checkpoints": ("..drafts",),
        "export/foreign": ("torch", "transformers", "..capture", "..drafts"),
        "export/tensorrt": ("torch", "transformers", "..capture", "..checkpoints", "..drafts"),
        "runtime/rules": ("..drafters", "..controller"),
        "runtime/drafters": ("..controller",),
    }
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder, names in forbidden.items()
        for path in sorted((root / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if (words := line.split()) and words[0] in ("import", "from")
        for name in names
        if words[1].rstrip(",") == name or words[1].startswith(name + ".")
    ]
    assert not found
