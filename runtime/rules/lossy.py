"""Decides which drafts to keep where the answer need not be the target's: the lossy rules, and how far each goes.

A rule keeps ``mass(v)`` <= q(v) of what the draft proposes and draws the rest from max(p - mass, 0), so that the token
has the law ``mass`` + (1 - sum of mass) * residual. The residual is never raised above p, hence its total variation
from p is exactly the sum of max(mass - p, 0): the least that keeping ``mass`` allows. That number comes with every
token. (``mass`` = min(p, q) is the rule of Leviathan et al. again, at distance 0.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .law import Probs, mass_of
from .verify import Draw, Uniforms, Verdict, excess, residual

Mass = Callable[[Probs, Probs], Probs]

EPSILON, DELTA = 0.09, 0.3  # as Medusa ships: delta = sqrt(epsilon)
LENIENCY = 0.5


def typical(epsilon: float, delta: float) -> Mass:
    """Typical acceptance, Cai et al. (Medusa, 2401.10774, section 2.3.1): all of q where the target finds a token
    likely enough, p > min(epsilon, delta exp(-H(p))), nothing elsewhere. Both in (0, 1]."""

    def mass(p: Probs, q: Probs) -> Probs:
        likely = p[p > 0]
        entropy = -float((likely * np.log(likely)).sum())
        kept: Probs = np.where(p > min(epsilon, delta * math.exp(-entropy)), q, 0.0)
        return kept

    return mass


def lenient(leniency: float) -> Mass:
    """Lenience, Leviathan et al. (2211.17192, appendix A.5): min(q, p / leniency), so that no token becomes more than
    1 / leniency times as likely as the target says. ``leniency`` in (0, 1]; 1 is their exact rule."""

    def mass(p: Probs, q: Probs) -> Probs:
        kept: Probs = np.minimum(q, p / leniency)
        return kept

    return mass


def relaxed(
    x: Sequence[int], q: Sequence[Probs] | None, p: Callable[[int], Probs], mass: Mass, uniforms: Uniforms, draw: Draw
) -> Verdict:
    """Keep x_i with probability mass / q, else draw from what is left of p. Arguments as in ``verify.rejection``."""
    distances: list[float] = []
    for i, drafted in enumerate(x):
        row = p(i)
        proposal = _one_hot(drafted, row) if q is None else q[i]
        kept = mass(row, proposal)
        distances.append(mass_of(excess(kept, row)))
        if not uniforms[i] * proposal.item(drafted) < kept.item(drafted):
            return Verdict(i, draw(residual(row, kept)), i + 1, tuple(distances))
    return Verdict(len(x), draw(p(len(x))), len(x), (*distances, 0.0))


def lenient_greedy(
    x: Sequence[int], weights: Callable[[int], Probs], best: Callable[[int], int], leniency: float
) -> Verdict:
    """Lenience at temperature 0 (appendix A.5): keep x_i while p(x_i) >= leniency * max p, else take the greedy token.

    ``weights(i)`` are p / max p, before any temperature. A token's distance is 1 where it is not the greedy one.
    """
    distances: list[float] = []
    for i, drafted in enumerate(x):
        if weights(i)[drafted] < leniency:
            return Verdict(i, best(i), i + 1, (*distances, 0.0))
        distances.append(float(drafted != best(i)))
    return Verdict(len(x), best(len(x)), len(x), (*distances, 0.0))


def _one_hot(token: int, p: Probs) -> Probs:
    q = np.zeros_like(p)
    q[token] = 1.0
    return q
