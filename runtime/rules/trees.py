"""Decides which branch of a draft tree to keep. Pure functions, as in ``verify.py``: randomness comes in.

A tree is ``parents``: node n continues node parents[n] < n, or the committed text where that is ROOT; a node whose
parent is ABSENT is padding and belongs to no branch. ``p(n)`` is the target's law after node n (ROOT: after the
committed text), ``q(n)`` the law that n's children were drawn from. A step feeds the last committed token and then all
nodes, each of which sees its ancestors and no one else (SpecInfer, Miao et al. 2305.09781, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .law import Law, Probs
from .nucleus import largest
from .verify import Draw, Uniforms, Verdict, residual, without

ROOT, ABSENT = -1, -2

Mask = NDArray[np.bool_]


def ancestry(parents: Sequence[int], size: int) -> Mask:
    """bool [size, size]: row i sees column j, for the step [last committed token, nodes..., padding]. Padding and
    absent nodes see themselves alone."""
    sees = np.eye(size, dtype=np.bool_)
    for n, parent in enumerate(parents):
        if parent != ABSENT:
            sees[n + 1] |= sees[parent + 1]
    return sees


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root's child to ``node``, which may be ROOT."""
    found = []
    while node != ROOT:
        found.append(node)
        node = parents[node]
    return found[::-1]


def children(parents: Sequence[int], node: int) -> list[int]:
    """In the order they were proposed."""
    return [n for n, parent in enumerate(parents) if parent == node]


def descend(parents: Sequence[int], x: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Go down to the child that equals the target's own choice ``choose(n)``, as long as there is one.

    Committed tokens are the target's own, whatever the tree (``verify.match`` on every branch at once).
    """
    node, kept = ROOT, list[int]()
    while below := children(parents, node):
        chosen = choose(node)
        if (found := next((n for n in below if x[n] == chosen), None)) is None:
            return Verdict(len(kept), chosen, len(kept) + 1, path=tuple(kept))
        kept.append(node := found)
    return Verdict(len(kept), choose(node), len(kept), path=tuple(kept))


def recursive_rejection(
    parents: Sequence[int],
    x: Sequence[int],
    q: Callable[[int], Law],
    p: Callable[[int], Law],
    uniforms: Uniforms,
    draw: Draw,
) -> Verdict:
    """Recursive rejection without replacement (Yang et al. 2401.06706, algorithm 2; Sequoia, 2402.12374): a node's
    children are tested in the order drawn, each against what is left of p and of q. ``uniforms[n]`` is node n's coin.
    """
    node, kept = ROOT, list[int]()
    while below := children(parents, node):
        left, law, accepted = p(node), q(node), None
        for n in below:
            if uniforms[n] * law.item(x[n]) < left.item(x[n]):
                accepted = n
                break
            left = residual(left, law)
            left = left / left.sum()
            law = without(law, x[n])
            law = law / law.sum()
        if accepted is None:
            return Verdict(len(kept), draw(left), len(kept) + 1, path=tuple(kept))
        kept.append(node := accepted)
    return Verdict(len(kept), draw(p(node)), len(kept), path=tuple(kept))


def draw_children(q: Probs, count: int, uniforms: Uniforms, draw: Callable[[Law, float], int]) -> list[int]:
    """Up to ``count`` tokens drawn from q one by one without replacement; fewer where q has no more."""
    drawn: list[int] = []
    left = q
    for uniform in uniforms[: min(count, int(np.count_nonzero(q)))]:
        drawn.append(token := draw(left, uniform))
        left = left.copy()
        left[token] = 0.0
    return drawn


def best_children(scores: Probs, count: int) -> list[int]:
    """Up to ``count`` tokens of the highest finite scores, the highest first, the lowest id among equals first."""
    count = min(count, int(np.isfinite(scores).sum()))
    if not count:
        return []
    ids = largest(scores, count)
    ordered: list[int] = ids[np.lexsort((ids, -scores[ids]))][:count].tolist()
    return ordered
