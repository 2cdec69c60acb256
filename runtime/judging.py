"""Decides which rule looks at a round's drafts, and hands it the row's laws and its randomness."""

from __future__ import annotations

from ..engines.base import Logits
from .drafters.base import Draft
from .rules import lossy, trees, verify
from .rules.law import Law, Probs, draw, whole
from .rules.noise import Purpose
from .sequence import Row
from .settings import LOSSY


def judge(row: Row, draft: Draft, logits: Logits) -> verify.Verdict:
    """Apply the row's rule. ``logits`` [>= K+1, V]: row i is the target's after the prefix and x_1..x_i."""
    if draft.parents is not None:
        return judge_tree(row, draft, draft.parents, logits)
    x, sampler, start = draft.tokens, row.sampler, row.sequence.length
    if sampler.rule in ("greedy", "coupled"):
        return verify.match(x, lambda i: sampler.choose(logits[i], x[:i], start + i))
    if sampler.rule in LOSSY:
        return judge_lossy(row, draft, logits)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x)) if x else ()
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]

    def one(i: int) -> Law:  # the last row is drawn from and no more: any factor of it will do
        law = sampler.chain.law if i < len(x) else sampler.chain.masses
        return law(logits[i], x[:i])

    def pick(law: Law) -> int:
        return draw(law, final)

    laws = None if draft.q is None else sampler.chain.distributions(logits, x)
    p = one if laws is None else laws.__getitem__
    if sampler.rule == "block" and draft.q is not None:
        return verify.block(x, draft.q, p, coins, pick)
    return verify.rejection(x, draft.q, p, coins, pick)


def judge_tree(row: Row, draft: Draft, parents: list[int], logits: Logits) -> verify.Verdict:
    """The same for a tree; ``logits`` [> nodes, V]: row n + 1 is the target's after node n."""
    x, sampler, start, q = draft.tokens, row.sampler, row.sequence.length, draft.q

    def before(node: int) -> list[int]:
        return [x[n] for n in trees.path(parents, node)]

    def choose(node: int) -> int:
        drafted = before(node)
        return sampler.choose(logits[node + 1], drafted, start + len(drafted))

    if q is None:
        return trees.descend(parents, x, choose)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]
    return trees.recursive_rejection(
        parents,
        x,
        lambda node: q[node + 1],
        lambda node: sampler.chain.law(logits[node + 1], before(node)),
        coins,
        lambda law: draw(law, final),
    )


def judge_lossy(row: Row, draft: Draft, logits: Logits) -> verify.Verdict:
    """The same for the lossy rules."""
    x, sampler, start, settings = draft.tokens, row.sampler, row.sequence.length, row.settings
    leniency = lossy.LENIENCY if settings.leniency is None else settings.leniency
    if settings.temperature == 0:

        def weights(i: int) -> Probs:
            return sampler.chain.weights(logits[i], x[:i])

        return lossy.lenient_greedy(x, weights, lambda i: sampler.choose(logits[i], x[:i], start + i), leniency)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]
    mass = lossy.lenient(leniency)
    if sampler.rule == "typical":
        epsilon = lossy.EPSILON if settings.typical_epsilon is None else settings.typical_epsilon
        mass = lossy.typical(epsilon, lossy.DELTA if settings.typical_delta is None else settings.typical_delta)
    q = None if draft.q is None else [whole(law, logits.shape[-1]) for law in draft.q]
    return lossy.relaxed(
        x, q, lambda i: sampler.chain.distribution(logits[i], x[:i]), mass, coins, lambda law: draw(law, final)
    )
