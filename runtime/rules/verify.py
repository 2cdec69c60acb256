"""Decides which drafted tokens to keep. Pure functions: randomness comes in, a Verdict goes out.

p = target, q = draft, as in Leviathan et al. (2211.17192); Chen et al. (2302.01318) use the letters the other way
round. ``x`` are K drafted tokens, ``uniforms`` at least K numbers in [0, 1). ``p(i)`` is the target's law after the
prefix and x_1..x_i (``law.py``: [V] of the logits' dtype, or few tokens), asked for in order and only when needed; it
sums to 1, but for p(K), which is only drawn from and may have any factor. ``q[i]`` is the very law that x_{i+1} was
drawn from, ``q`` None means that the draft is deterministic (one-hot). ``draw(law)`` samples from unnormalised masses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import buffers
from .law import Few, Law, mass_of, masses_of, whole

Uniforms = Sequence[float] | NDArray[np.float64]
Draw = Callable[[Law], int]
Outcomes = Sequence[tuple[float, float]]  # of each position: how far it was reached, and how far its draft was kept


class Verdict(NamedTuple):
    """Keep the first ``accepted`` drafts, then ``token``. ``tested`` drafts were looked at.

    ``distances``: of each of these accepted + 1 tokens, the total variation between the law it was drawn from and the
    target's; none from an exact rule, where all are 0. ``path``: the nodes kept of a draft that is a tree.
    ``expected``: the ``outcomes`` where less was left to chance.
    """

    accepted: int
    token: int
    tested: int
    distances: tuple[float, ...] = ()
    path: tuple[int, ...] = ()
    expected: Outcomes = ()

    @property
    def outcomes(self) -> Outcomes:
        """Of each position that says something about the draft: (reached, kept), 1 or 0 as it happened; with coins,
        their expectation given the drafts (Rao-Blackwell: the same mean, without the noise of the coins)."""
        return self.expected or happened(self.tested, self.accepted)


def happened(tested: int, accepted: int) -> Outcomes:
    """Outcomes of ``tested`` positions, of which the first ``accepted`` were kept: what stands behind the first
    rejection was not reached."""
    return [(1.0, float(position < accepted)) for position in range(tested)]


def match(x: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Keep drafts while they equal the target's own choice ``choose(i)`` after x_1..x_i.

    Committed tokens are the target's own, whatever the draft: with argmax this is greedy decoding; with
    argmax(log p + Gumbel noise of the position) it is the coupling of Daliri, Musco and Suresh (2408.07978).
    """
    for i, drafted in enumerate(x):
        if (chosen := choose(i)) != drafted:
            return Verdict(i, chosen, i + 1)
    return Verdict(len(x), choose(len(x)), len(x))


def rejection(
    x: Sequence[int], q: Sequence[Law] | None, p: Callable[[int], Law], uniforms: Uniforms, draw: Draw
) -> Verdict:
    """Leviathan et al. 2211.17192, algorithm 1: accept with probability min(1, p/q), else draw from the residual.

    A deterministic draft is q one-hot: accepted with p(x), residual p without x.
    """
    expected: list[tuple[float, float]] = []
    for i, drafted in enumerate(x):
        row = p(i)
        chance, given = row.item(drafted), 1.0 if q is None else q[i].item(drafted)
        expected.append((1.0, 1.0 if chance >= given else chance / given))
        if not uniforms[i] * given < chance:
            rest = without(row, drafted) if q is None else residual(row, q[i])
            return Verdict(i, draw(rest), i + 1, expected=expected)
    return Verdict(len(x), draw(p(len(x))), len(x), expected=expected)


def block(x: Sequence[int], q: Sequence[Law], p: Callable[[int], Law], uniforms: Uniforms, draw: Draw) -> Verdict:
    """Block verification, Sun et al. 2403.10444, algorithm 2: keeps the longest prefix whose own coin lands.

    b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)); h_i = R_i / (R_i + 1 - b_i) with R_i the mass of
    max(b_i p_{i+1} - q_{i+1}, 0); h_K = b_K. Never fewer tokens in expectation than ``rejection``. All drafts are
    looked at, but ``tested`` counts those up to the first not kept, as the other rules do. Given the drafts, the chance
    that at least i are kept is b_i, by induction from the last: h_i + (1 - h_i) (b_i - R_i) = b_i.
    """
    weights, rows, expected = [1.0], list[Law](), list[tuple[float, float]]()
    for i, drafted in enumerate(x):
        rows.append(p(i))
        weight = min(1.0, weights[i] * rows[i].item(drafted) / q[i].item(drafted))
        expected.append((weights[i], weight))
        if weight == 0.0:
            break  # and stays 0: no longer prefix can be kept
        weights.append(weight)

    def lands(i: int) -> bool:
        return uniforms[i - 1] < (block_threshold(weights[i], rows[i], q[i]) if i < len(x) else weights[i])

    accepted = next((i for i in range(len(weights) - 1, 0, -1) if lands(i)), 0)  # of shorter ones nobody asks
    law = p(accepted) if accepted == len(x) else residual(rows[accepted], q[accepted], weights[accepted])
    return Verdict(accepted, draw(law), min(accepted + 1, len(x)), expected=expected)


def block_threshold(weight: float, p: Law, q: Law) -> float:
    """h_i for i < K: the probability of keeping the prefix, given that no longer one is kept. 0/0 is 1. ``p`` and ``q``
    are the laws of the token behind it."""
    if weight == 1.0:
        return 1.0
    mass = mass_of(excess(p, q, weight))
    return mass / (mass + 1.0 - weight)


def excess(p: Law, q: Law, weight: float = 1.0) -> Law:
    """max(weight p - q, 0), unnormalised; as max(weight p, q) - q, for numpy compares with a number three times as long
    as with another array."""
    if isinstance(p, Few):
        pairs = zip(p.values(), masses_of(q, p), strict=True)
        return Few.of(p, [left if (left := weight * mass - given) > 0.0 else 0.0 for mass, given in pairs])
    q, rest = whole(q, p.size), buffers.like(p)
    scaled = p if weight == 1.0 else np.multiply(p, weight, out=rest)
    np.maximum(scaled, q, out=rest)
    rest -= q
    return rest


def residual(p: Law, q: Law, weight: float = 1.0) -> Law:
    """max(weight p - q, 0), unnormalised; p itself where nothing is left (p equals q up to rounding)."""
    rest = excess(p, q, weight)
    return rest if _any(rest) else p


def without(p: Law, token: int) -> Law:
    """p with ``token`` struck out, unnormalised; p itself where nothing is left."""
    if isinstance(p, Few):
        others = Few.of(p, [mass if other != token else 0.0 for other, mass in p.items()])
        return others if _any(others) else p
    rest = buffers.like(p)
    rest[:] = p
    rest[token] = 0.0
    return rest if _any(rest) else p


def _any(law: Law) -> bool:
    """Whether any token has a mass. (``max`` has more overhead than ``argmax``.)"""
    return any(law.values()) if isinstance(law, Few) else bool(law[law.argmax()])
