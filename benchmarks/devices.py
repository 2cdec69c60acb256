"""A device of which only the prices are known (``devices.json``): what the controller makes of it is the same on every
machine and free of noise. Texts and drafts are the pair's own; what free drafters take is counted by the clock's looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import leadout
from leadout.engines import Engine
from leadout.engines.priced import Clock, Priced, Prices
from leadout.runtime import ahead, bench, decoder, stats
from leadout.runtime.controller import cascade

TABLES = Path(__file__).with_name("devices.json")
SEED = 20261121  # at a temperature above 0 all drafts write the text of this seed, and can be compared


@contextmanager
def priced(pair: leadout.Pair, plain: Engine | None, name: str) -> Iterator[Engine]:
    """While inside, ``pair`` and what decodes plainly beside it (given here, or the pair's target) take the time of the
    table ``name``, and what steps were measured to take on the real device counts for nothing. Gives the latter."""
    prices, clock = Prices.read(TABLES, name), Clock()
    pair.known = ()
    bare = Priced(plain or pair.target, clock, prices.bare, beside=prices.beside)
    own = prices.target if pair.exact else prices.bare
    pair.target = Priced(pair.target, clock, own, beside=prices.beside)
    if pair.draft is not None:
        pair.draft = Priced(pair.draft, clock, prices.drafts)
    with clock.told((ahead, bench, cascade, decoder, stats)):
        yield bare
