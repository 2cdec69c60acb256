"""What is each part of the controller worth? ``auto`` as it is, and with one part at a time made to do nothing.

    python benchmarks/parts.py bundles/demo-int8 --priced demo-int8
    python benchmarks/parts.py bundles/demo-int8 --priced grown-int8 --temperature 1 --texts 2 --json parts.json

Steps take what a table of ``devices.json`` says, so the figures are the same on every machine; what Python takes for a
part is hardly in them. ``--texts`` begins with a new decoder after so many: then it counts what it costs to learn.
A part that is worth nothing here may be what holds where estimates are wrong: the tests' made-up laws say more of that.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from devices import SEED, priced
from programs import at_least_one, keep, read_kinds, result_file, run

import leadout
from leadout.runtime import admission
from leadout.runtime.controller import costs, prices
from leadout.runtime.controller.bill import Bill
from leadout.runtime.controller.cascade import Cascade, Commons
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.coverage import Coverage
from leadout.runtime.controller.easiness import Easiness
from leadout.runtime.controller.policy import Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.controller.vigil import Vigil
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.free import Discount
from leadout.runtime.drafters.suffix import EarlierTexts
from leadout.runtime.settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH

DRAFTERS, FIRST = Commons.drafters, Coverage.first_length
FLAT = [1.0] * (MAX_GUESS_LENGTH + 2)


def with_recycling(commons: Commons, kind: str, family: Any = None, **how: Any) -> list[Any]:
    return DRAFTERS(commons, kind, family, **how | {"model": False})


def without_earlier_texts(commons: Commons, kind: str, family: Any = None, **how: Any) -> list[Any]:
    return [each for each in DRAFTERS(commons, kind, family, **how) if not isinstance(each, EarlierTexts)]


def promised(pace: Pace, this: Round, auto: Any) -> float:
    return max(pace._speeds([(policy.tokens, MAX_DRAFT_LENGTH) for policy in auto], this.rows))


def whatever_seems_best(coverage: Coverage, limit: int, rows: int = 1, narrowest: int = 1, best: Any = None) -> Any:
    return FIRST(coverage, limit, rows, narrowest)


def as_any_step(known: Costs, rows: int, width: int, past: int = 0) -> float | None:
    steps = known.target(rows, past)
    return None if steps is None else steps[width]


# What is changed -> where, and into what.
CHANGES: dict[str, dict[tuple[Any, str], Any]] = {
    "as it is": {},
    "no discount of promises": {(Discount, "factor"): property(lambda self: 1.0)},
    "drafts go as far as was chosen": {(Pace, "watch"): lambda self, this, policies, **how: None},
    "the price of time is as promised": {(Pace, "_local"): promised},
    "no bill": {(Bill, "loses"): property(lambda self: False)},
    "no hope": {(Pace, "_hoped"): lambda self, requests, rows: 0},
    "easy rounds are as others": {
        (Easiness, "factors"): lambda self, promised: (1.0,) * (MAX_DRAFT_LENGTH + 1),
    },
    "free drafters never sleep": {
        (Vigil, "awake"): property(lambda self: True),
        (Vigil, "sleeps_on"): property(lambda self: False),
    },
    "plain steps are as others": {
        (Costs, "plain"): as_any_step,
        (Coverage, "lacks_plain"): lambda self, rows: False,
    },
    "measurements do not wait for guesses": {(Cascade, "_waits"): lambda self, this, length, promised: False},
    "unknown steps take as long as any": {(costs, "UNKNOWN"): FLAT, (prices, "UNKNOWN"): FLAT},
    "all lengths are measured at first": {(Coverage, "first_length"): whatever_seems_best},
    "texts that repeat are as others": {(admission, "repeats"): lambda prompt: False},
    "nothing of earlier texts": {(Commons, "drafters"): without_earlier_texts},
    "recycled tokens beside the model": {(Commons, "drafters"): with_recycling},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--priced", metavar="DEVICE", default="demo-int8", help="whose prices of devices.json")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "kinds.jsonl")
    parser.add_argument("--limit", type=at_least_one, default=12, help="prompts of each kind")
    parser.add_argument("--texts", type=int, default=0, help="texts that a decoder sees (0: all, after two to warm up)")
    parser.add_argument("--max-new-tokens", type=at_least_one, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=result_file, help="write the result to this file")
    options = parser.parse_args()
    rates: dict[str, float] = {}
    with leadout.load(options.bundle) as pair:
        prompts = prompts_of(pair, options)
        for name, change in CHANGES.items():
            with ExitStack() as stack:
                for (owner, attribute), instead in change.items():
                    stack.enter_context(patch.object(owner, attribute, instead))
                rates[name] = rate(pair, prompts, options)
            of_whole = rates[name] / rates["as it is"]
            print(f"{name:36} {rates[name]:8.1f} tokens/s {of_whole:6.3f}", flush=True)
            how = {"priced": options.priced, "temperature": options.temperature, "texts": options.texts}
            keep(options.json, how | {"rates": rates})


def prompts_of(pair: leadout.Pair, options: argparse.Namespace) -> list[list[int]]:
    """The first of each kind, the second of each, ..."""
    kinds = [texts[: options.limit] for texts in read_kinds(str(options.prompts)).values()]
    return [pair.token_ids(text) for each in zip(*kinds, strict=False) for text in each]


def rate(pair: leadout.Pair, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Tokens a second of ``auto`` after each prompt, on the clock of a priced device."""
    engines, tokens, seconds = (pair.target, pair.draft), 0, 0.0
    how: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "seed": SEED}

    def write(prompt: list[int]) -> Any:
        return pair.generate(prompt, ignore_eos=True, **how).stats

    def begin() -> None:
        """Take a new decoder; warm it up if it is to see all texts."""
        pair.decoder = Decoder(pair.target, pair.draft, exact=pair.exact, vocabulary=pair.vocabulary)
        if not options.texts:
            for _ in range(2):
                write(prompts[0][::-1])
            pair.forget()

    try:
        with priced(pair, None, options.priced):
            for number, prompt in enumerate(prompts):
                if number % (options.texts or len(prompts)) == 0:
                    begin()
                stats = write(prompt)
                tokens += stats.tokens
                seconds += stats.total_seconds - stats.seconds["prefill"]
    finally:
        pair.target, pair.draft = engines
    return tokens / seconds


if __name__ == "__main__":
    run(main)
