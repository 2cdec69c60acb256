"""Cut the benchmark prompts out of the held-out files: ten each of four kinds, from a line to a page long.

    python -m leadout.scripts.make_prompts > benchmarks/prompts.jsonl

``completion`` stops after the head of a function, ``prose`` inside a docstring, ``table`` inside a literal, and
``edit`` gives a function whole and begins to write it again.
"""

from __future__ import annotations

import ast
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import click

HELD_OUT = Path(__file__).with_name("held_out.txt")

PER_KIND = 10
LENGTHS = (80, 200, 500, 1000, 1600)  # characters of text before the cut, in turn

Cut = tuple[int, int]  # the first line of the construct and the line before which the prompt ends, from zero


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.end_lineno - n.lineno >= 8]  # type: ignore[operator]


def completion(tree: ast.Module) -> Iterator[Cut]:
    for f in functions(tree):
        yield f.lineno - 1, f.body[0].lineno - 1


def prose(tree: ast.Module) -> Iterator[Cut]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") >= 8:
            yield node.lineno - 1, node.lineno + 2


def table(tree: ast.Module) -> Iterator[Cut]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set) and (node.end_lineno or 0) - node.lineno >= 3:
            yield node.lineno - 1, node.lineno + 2


def edit(tree: ast.Module) -> Iterator[Cut]:
    for f in functions(tree):
        if f.end_lineno is not None and f.end_lineno - f.lineno <= 30:
            yield f.lineno - 1, f.end_lineno


KINDS: dict[str, Callable[[ast.Module], Iterator[Cut]]] = {
    "completion": completion,
    "prose": prose,
    "table": table,
    "edit": edit,
}


def prompts(kind: str, texts: dict[str, str]) -> Iterator[dict[str, str]]:
    """One prompt a file, from the construct nearest to the file's middle."""
    lengths = itertools.cycle(LENGTHS)
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        cuts = sorted(KINDS[kind](ast.parse(text)), key=lambda cut: abs(cut[0] - len(lines) // 2))
        if not cuts:
            continue
        first, end = cuts[0]
        if kind == "edit":
            body = "".join(lines[first:end])
            yield {"kind": kind, "file": name, "prompt": f"{body}\n\n{lines[first]}"}
        else:
            before = "".join(lines[:end])
            start = before.rfind("\n", 0, max(0, len(before) - next(lengths))) + 1
            yield {"kind": kind, "file": name, "prompt": before[start:]}


@click.command()
def main() -> None:
    """Print the prompts, one JSON object a line."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {name: (root / name).read_text(encoding="utf-8") for name in HELD_OUT.read_text(encoding="utf-8").split()}
    for kind in KINDS:
        for prompt in itertools.islice(prompts(kind, texts), PER_KIND):
            click.echo(json.dumps(prompt))


if __name__ == "__main__":
    main()
