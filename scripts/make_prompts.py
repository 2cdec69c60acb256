"""Cut the benchmark prompts out of the held-out files: two sets of four kinds, from a line to a page long.

    python -m leadout.scripts.make_prompts > benchmarks/prompts.jsonl
    python -m leadout.scripts.make_prompts --kinds > benchmarks/kinds.jsonl

``completion`` stops after the head of a function, ``prose`` inside a docstring, ``table`` inside a literal, and
``edit`` gives a function whole and begins to write it again. ``--kinds`` takes twelve of each from the other end of
the list of files, and its ``edit`` is one in earnest, made again and again: three copies, each with the function and an
argument renamed, the last one written down to the middle.

No prompt ends in white space. A tokenizer makes one token of a line's end and the next line's indentation; behind a
newline of its own a model has only ever seen text that begins in the first column, and writes that.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import click

HELD_OUT = Path(__file__).with_name("held_out.txt")

PER_KIND, PER_KIND_AGAIN = 10, 12
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
            yield {"kind": kind, "file": name, "prompt": f"{body}\n\n{lines[first]}".rstrip()}
        else:
            before = "".join(lines[:end])
            start = before.rfind("\n", 0, max(0, len(before) - next(lengths))) + 1
            yield {"kind": kind, "file": name, "prompt": before[start:].rstrip()}


def renamed(text: str) -> Iterator[tuple[int, str]]:
    """For every function of ``text`` that lends itself: its first line, and the prompt that begins to edit it."""
    lines = text.splitlines(keepends=True)
    for f in functions(ast.parse(text)):
        body = lines[f.lineno - 1 : f.end_lineno]
        arguments = [arg.arg for arg in f.args.args if arg.arg not in ("self", "cls")]
        if not arguments or len(body) > 20 or len("".join(body)) > 700:
            continue
        pattern = re.compile(rf"\b{arguments[0]}\b")
        copies = [
            [pattern.sub(f"{arguments[0]}_{i}", line).replace(f"def {f.name}(", f"def {f.name}_{i}(") for line in body]
            for i in (2, 3, 4)
        ]
        half = len(body) // 2
        if pattern.search("".join(body[1:half])) and pattern.search("".join(body[half:])):
            whole = "".join(["".join([*each, "\n"]) for each in (body, *copies[:-1])])
            yield f.lineno - 1, (whole + "".join(copies[-1][:half])).rstrip()


def edits(texts: dict[str, str]) -> Iterator[dict[str, str]]:
    """One prompt a file: the function nearest to its middle, and its edited copies, the last one half."""
    for name, text in texts.items():
        middle = text.count("\n") // 2
        found = sorted(renamed(text), key=lambda each, middle=middle: abs(each[0] - middle))  # type: ignore[misc]
        if found:
            yield {"kind": "edit", "file": name, "prompt": found[0][1]}


@click.command()
@click.option("--kinds", "again", is_flag=True, help="The second set.")
def main(again: bool) -> None:
    """Print the prompts, one JSON object a line."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = HELD_OUT.read_text(encoding="utf-8").split()
    texts = {name: (root / name).read_text(encoding="utf-8") for name in (reversed(names) if again else names)}
    for kind in KINDS:
        made = edits(texts) if again and kind == "edit" else prompts(kind, texts)
        for prompt in itertools.islice(made, PER_KIND_AGAIN if again else PER_KIND):
            click.echo(json.dumps(prompt))


if __name__ == "__main__":
    main()
