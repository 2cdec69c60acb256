"""What the demo pair learns to copy from: functions of its corpus, written again with names changed."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from leadout.scripts import pair_edits

TEXTS = {
    "one.py": '''
import os

def area(width, height):
    """The area."""
    if width < 0:
        raise ValueError(width)
    return width * height

def short():
    return 1

class Box:
    async def measure(self, width):
        await self.ready()
        for side in range(4):
            self.sides.append(side)
        return self.sides, width
''',
    "not_python.py": "print 'hello'\n" * 8,
    "long.py": "def endless():\n" + "    step()\n" * 200,
}


def versions(document: str) -> list[str]:
    """A document's functions, each one's lines (none of them has an empty one)."""
    return [part + "\n" for part in document.strip("\n").replace("\n\n\n", "\n\n").split("\n\n")]


def test_functions_are_those_of_some_lines_that_fit() -> None:
    found = [body for text in TEXTS.values() for body in pair_edits.functions(text)]
    assert [body.split("(")[0].strip() for body in found] == ["def area", "async def measure"]
    assert all(body.endswith("\n") and not body.endswith("\n\n") for body in found)


def test_names_are_the_functions_own_and_those_that_occur_again() -> None:
    area, measure = (body for text in TEXTS.values() for body in pair_edits.functions(text))
    assert pair_edits.names(area) == ["area", "width", "height"]
    assert pair_edits.names(measure) == ["measure", "width", "side", "sides"]


def test_only_whole_words_are_renamed() -> None:
    text = "width = self.width + widths + my_width"
    assert pair_edits.renamed(text, {"width": "x_1"}) == "x_1 = self.x_1 + widths + my_width"


@pytest.mark.parametrize("seed", range(20))
def test_each_copy_is_the_function_with_one_to_three_names_changed(seed: int) -> None:
    bodies = [body for text in TEXTS.values() for body in pair_edits.functions(text)]
    documents, sizes = list(pair_edits.edited(TEXTS, seed)), Counter[int]()
    assert sorted(versions(document)[0] for document in documents) == sorted(bodies)
    for document in documents:
        body, *copies = versions(document)
        assert 1 <= len(copies) <= 4
        for copied in copies:
            mine, theirs = (re.findall(r"\w+", text) for text in (body, copied))
            changed = {old: new for old, new in zip(mine, theirs, strict=True) if old != new}
            assert len(changed) <= 3 and changed.keys() <= set(pair_edits.names(body))
            assert pair_edits.renamed(body, changed) == copied
            sizes[len(changed)] += 1
    assert sizes[1] + sizes[2] + sizes[3] > sizes[0], "a name drawn from a small corpus may be the old one"


def test_a_seed_makes_the_same_documents_and_another_one_others() -> None:
    assert list(pair_edits.edited(TEXTS, 1)) == list(pair_edits.edited(TEXTS, 1))
    assert len({tuple(pair_edits.edited(TEXTS, seed)) for seed in range(10)}) > 5
