"""What free drafters make of edits whose text is known: functions of the standard library, written again with changes.

    python benchmarks/edits.py
    python benchmarks/edits.py --priced demo-int8

The target writes what it is told to, at the prices of a device (``devices.json``); its answers are edits as a model
makes them that copies faithfully, which the demo target is too small for. Tokens a second and a round, with the drafter
that knows of changes (``runtime/drafters/edits.py``) and without it.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from keyword import iskeyword
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
from devices import TABLES
from numpy.typing import NDArray
from programs import run
from tokenizers import Tokenizer

from leadout.engines.priced import Clock, Priced, Prices
from leadout.engines.toy import ToyEngine
from leadout.runtime import decoder, stats
from leadout.runtime.controller import cascade
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.edits import EditedCopy
from leadout.runtime.settings import Settings
from leadout.scripts.make_prompts import HELD_OUT, functions

TOKENIZER = Path(__file__).parents[1] / "models" / "target" / "tokenizer.json"
CONTEXT = 2048
Text = tuple[list[int], list[int]]  # a prompt, and what is written after it


def numbered(body: str, number: int) -> str:
    """Its first argument and itself by a number."""
    name, argument = re.findall(r"def (\w+)\((?:self, |cls, )?(\w+)", body)[0]
    return re.sub(rf"\b({argument}|{name})\b", rf"\1_{number}", body)


def camel(body: str) -> str:
    """Three of its names in another spelling."""
    names = Counter(name for name in re.findall(r"\b[a-z_]{4,}\b", body) if not iskeyword(name) and name != "self")
    for name, _ in names.most_common(3):
        body = re.sub(rf"\b{name}\b", name.title().replace("_", "") + "Value", body)
    return body


EDITS: dict[str, Callable[[str], str]] = {
    "names numbered": lambda body: numbered(body, 4),
    "names spelt otherwise": camel,
    "other quotes": lambda body: body.replace("'", '"'),
    "put in": lambda body: body.replace("self.", "self.state."),
    "taken out": lambda body: body.replace("self.", ""),
    "nothing": lambda body: body,
}
FEWEST = 5  # changed places that make an edit


def bodies() -> Iterator[str]:
    """The functions of the held-out files that take an argument, of 400 to 1,800 characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in HELD_OUT.read_text(encoding="utf-8").split():
        text = (root / name).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for function in functions(ast.parse(text)):
            body = "".join(lines[function.lineno - 1 : function.end_lineno])
            if 400 < len(body) < 1800 and re.search(r"def \w+\((?:self, |cls, )?\w+", body):
                yield body


def texts(edit: str, tokenizer: Tokenizer) -> Iterator[Text]:
    """Each function and the first quarter of its edit, and the rest of that. Numbered ones stand there twice before."""
    for body in bodies():
        edited = EDITS[edit](body)
        changed = sum(a != b for a, b in zip(re.findall(r"\w+|\W", body), re.findall(r"\w+|\W", edited), strict=False))
        if edit != "nothing" and changed < FEWEST:
            continue
        cut = edited.find("\n", len(edited) // 4)
        before = [body, *(numbered(body, n) for n in (2, 3))] if edit == "names numbered" else [body]
        prompt = tokenizer.encode("\n".join([*before, edited[:cut]])).ids
        answer = tokenizer.encode(edited[cut:]).ids
        if len(prompt) + len(answer) < CONTEXT:
            yield [0, *prompt], answer


def told(text: list[int], vocabulary: int) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    """The law of one who writes ``text``, whatever else it is given."""

    def law(context: NDArray[np.int64]) -> NDArray[np.float64]:
        chances = np.zeros(vocabulary)
        chances[text[len(context)] if len(context) < len(text) else 0] = 1.0
        return chances

    return law


def rates(found: list[Text], prices: Prices, vocabulary: int) -> tuple[float, float]:
    """Tokens a second, and a round."""
    clock = Clock()
    tokens, rounds, seconds = 0, 0, 0.0
    with clock.told((cascade, decoder, stats)):
        target = ToyEngine(told([], vocabulary), vocabulary, max_context=CONTEXT + 128)
        writer = Decoder(Priced(target, clock, prices.target, beside=prices.beside), None)
        for prompt, answer in found:
            target.law = told([*prompt, *answer], vocabulary)
            settings = Settings(max_new_tokens=len(answer), temperature=0.0, draft="suffix")
            events, begun = [], None
            for event in writer.decode([(prompt, settings)]):
                begun = clock.now if begun is None else begun  # after the prompt and its first round
                events.append(event)
            assert [token for event in events for token, _ in event.tokens] == answer
            tokens, rounds = tokens + len(answer) - len(events[0].tokens), rounds + len(events) - 1
            seconds += clock.now - (begun or 0.0)
    return tokens / seconds, tokens / rounds


@click.command()
@click.option("--priced", "device", default="grown-int8", show_default=True, metavar="DEVICE")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N texts of each edit.")
def main(device: str, limit: int | None) -> None:
    """Write known edits with and without the drafter that knows of changes."""
    prices, tokenizer = Prices.read(TABLES, device), Tokenizer.from_file(str(TOKENIZER))
    vocabulary = tokenizer.get_vocab_size()
    print(f"{'changed':24}{'texts':>6}{'plain':>9}{'without':>9}{'with':>9}{'':>7}   tokens a round")
    for edit in EDITS:
        found = list(islice(texts(edit, tokenizer), limit))
        speed, per_round = rates(found, prices, vocabulary)
        with patch.object(EditedCopy, "candidates", lambda copy: iter(())):  # it knows of changes, and says nothing
            slower, fewer = rates(found, prices, vocabulary)
        line = f"{edit:24}{len(found):6}{1e3 / prices.plain:9.0f}{slower:9.0f}{speed:9.0f}{speed / slower:7.2f}"
        print(f"{line}   {fewer:.1f} -> {per_round:.1f}", flush=True)


if __name__ == "__main__":
    run(main)
