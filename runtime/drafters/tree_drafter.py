"""Decides what tree of tokens the draft model proposes: children by depth, a step of the draft for each level."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from ...engines.base import LogitRow, Logits
from ...errors import UsageError
from ..rules import trees
from ..rules.law import Law, draw
from ..rules.noise import Purpose
from ..rules.sampling import Sampler
from ..rules.trees import ABSENT, ROOT, path
from ..sequence import Row
from .base import Draft
from .confidence import Watch
from .model_drafter import ModelDrafter


class TreeDrafter(ModelDrafter):
    """The draft model with a tree for a draft: ``Settings.branches`` children a node, the same for all rows of a batch.

    Level by level, each one step on top of the nodes before it. A node's slot is its number, in every row alike: what
    a row has no token for (q has fewer tokens than children are asked for, or a text ends) is an ABSENT node. The last
    level is never fed.
    """

    watches = False  # its shape is given
    resumes = False
    _fed = 0

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        """``lengths[b]`` levels for row b, never fewer; ``q[n + 1]`` is what node n's children were drawn from."""
        drafts = [Draft(parents=[]) for _ in rows]
        self._fed = 0
        if not (deepest := max(lengths, default=0)):
            return drafts
        shape = next(row.settings.branches for row, n in zip(rows, lengths, strict=True) if n)[:deepest]
        pending = [self._unfed(b, row, []) if lengths[b] else [] for b, row in enumerate(rows)]
        self._begin(rows, [])
        logits = self._feed(pending)
        above = range(ROOT, ROOT + 1)
        for depth, width in enumerate(shape):
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
                if depth < lengths[place]:
                    self._grow(row, draft, above, width, logits[place] if depth else [logits[place]])
            self._fed, above = above.stop, range(above.stop, above.stop + len(above) * width)
            if depth + 1 < deepest:
                logits = self._feed_level(drafts, above)
        return drafts

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        kept = [node for node in path if node < self._fed]
        self._stepper.compact(place, self._base[place], kept)
        self._valid[place] = self._base[place] + len(kept)

    def _grow(self, row: Row, draft: Draft, above: range, width: int, logits: Items[LogitRow] | Logits) -> None:
        """Give each node of ``above`` its ``width`` children; logits [len(above), V] are the draft's after each."""
        assert draft.parents is not None
        for node, scores in zip(above, logits, strict=True):
            tokens, q = list[int](), None
            if node == ROOT or draft.parents[node] != ABSENT:
                drafted = [draft.tokens[n] for n in path(draft.parents, node)]
                first, start = len(draft.tokens), row.sequence.length
                try:
                    nodes = range(first, first + width)
                    tokens, q = branch(row.sampler, self._vocabulary.row(scores), drafted, start, nodes)
                except UsageError:  # as in a chain
                    if self._vocabulary.identical and node == ROOT:
                        raise
            missing = width - len(tokens)
            draft.tokens += tokens + [0] * missing
            draft.parents += [node] * len(tokens) + [ABSENT] * missing
            if not row.sampler.deterministic:
                draft.q = [*(draft.q or []), np.zeros(0) if q is None else q]

    def _feed_level(self, drafts: Items[Draft], level: range) -> Logits:
        """Feed the nodes of ``level``; logits [B, len(level), V]. A row that has none is fed padding."""
        pieces, sees = [], []
        for draft in drafts:
            missing = max(0, level.stop - len(draft.tokens))
            parents = [*(draft.parents or []), *[ABSENT] * missing][: level.stop]
            nodes = [*draft.tokens, *[0] * missing][level.start : level.stop]
            pieces.append(self._vocabulary.tokens(nodes))
            sees.append(trees.ancestry(parents, level.stop + 1)[level.start + 1 :, 1:])
        past = [valid + level.start for valid in self._valid[: len(drafts)]]
        return self._stepper.tree_logits(pieces, past, np.stack(sees))


def branch(
    sampler: Sampler, logits: LogitRow, drafted: Items[int], start: int, nodes: range
) -> tuple[list[int], Law | None]:
    """Tokens for ``nodes``, children of the node that ``drafted`` leads to, in the round at ``start``: the likeliest
    (greedy), those of the largest noise + log q (coupled: the first is the chain's), else drawn from q (returned, too)
    without replacement. Fewer where there are no more."""
    if sampler.chain.settings.temperature == 0:
        weights = sampler.chain.weights(logits, drafted)
        return trees.best_children(np.where(weights > 0, weights, -np.inf), len(nodes)), None
    if sampler.rule == "coupled":
        return trees.best_children(sampler.noisy(logits, drafted, start + len(drafted)), len(nodes)), None
    q = sampler.chain.distribution(logits, drafted)
    coins = sampler.noise.uniforms(start, Purpose.DRAFT, nodes.stop)[nodes.start :]
    return trees.draw_children(q, len(nodes), coins, draw), q
