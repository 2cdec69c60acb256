"""Makes text that is edited in earnest: functions of the corpus, written again and again with names changed.

A small model that only ever read files one after the other does not learn to look back: begun on the fourth copy of a
function, it loses the thread after a line. Large models have seen enough repetition to copy what they are given; this
gives the demo pair its share.
"""

from __future__ import annotations

import ast
import keyword
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator

_LEAST_LINES, _MOST_CHARACTERS = 5, 1200  # of a function that is written again: four such copies fill the context
_NAME = re.compile(r"\b[A-Za-z_]\w{2,}\b")
_KEPT = frozenset([*keyword.kwlist, "self", "cls"])


def edited(texts: dict[str, str], seed: int) -> Iterator[str]:
    """For every function of ``texts``, in a seeded order: itself and one to four copies, in each of which one to three
    names are others: numbered ones, or names from elsewhere in the corpus."""
    rng = random.Random(seed)
    bodies = [body for text in texts.values() for body in functions(text)]
    words = sorted({name for body in bodies for name in names(body)})
    rng.shuffle(bodies)
    for body in bodies:
        candidates = names(body)
        changed = rng.sample(candidates, min(len(candidates), rng.randint(1, 3)))
        numbered, first = rng.random() < 0.5, rng.randint(1, 20)
        copies = [body]
        for number in range(first, first + rng.randint(1, 4)):
            copies.append(renamed(body, {n: f"{n}_{number}" if numbered else rng.choice(words) for n in changed}))
        yield rng.choice(["\n", "\n\n"]).join(copies)


def functions(text: str) -> Iterator[str]:
    """The source of each function and method of ``text`` of five lines to 1,200 characters; of what is no Python,
    none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # test suites hold strings that newer versions warn of
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            if node.end_lineno - node.lineno + 1 >= _LEAST_LINES and len(body) <= _MOST_CHARACTERS:
                yield body.rstrip() + "\n"


def names(function: str) -> list[str]:
    """The names that may be changed in it: its own, and those that occur more than once."""
    found = Counter(name for name in _NAME.findall(function) if name not in _KEPT)
    return [name for place, (name, times) in enumerate(found.items()) if not place or times > 1]


def renamed(text: str, others: dict[str, str]) -> str:
    """``text`` with every whole word that is a key of ``others`` changed into what it says."""
    return _NAME.sub(lambda match: others.get(match.group(), match.group()), text)
