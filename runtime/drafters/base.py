"""What a draft is, and what one asks of who proposes it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from ..prefill import ALL
from ..rules.sampling import Probs
from ..rules.trees import ABSENT, path
from ..rules.verify import Verdict
from ..sequence import Row
from .confidence import Watch


@dataclass(slots=True)
class Draft:
    """Proposed tokens, the distributions they were drawn from (``q`` None: the proposal is deterministic), and the
    name of the drafter. ``q`` are arrays [V]: of a chain one a token; of a tree q[n + 1] is what the children
    of node n were drawn from and q[0] what the root's were, of none where a node has no children. ``classes`` say how
    sure of each token the drafter was, where that was watched. With ``parents`` the tokens are a tree
    (``rules/trees.py``), else a chain."""

    tokens: list[int] = field(default_factory=list)
    q: list[Probs] | None = None
    by: str = "model"
    classes: list[int] = field(default_factory=list)
    parents: list[int] | None = None

    @property
    def drafted(self) -> int:
        """How many tokens are proposed."""
        return len(self.tokens) if self.parents is None else len(self.parents) - self.parents.count(ABSENT)

    @property
    def depth(self) -> int:
        """The most that may be accepted."""
        if self.parents is None:
            return len(self.tokens)
        return max((len(path(self.parents, n)) for n, parent in enumerate(self.parents) if parent != ABSENT), default=0)

    def kept(self, verdict: Verdict) -> list[int]:
        """The tokens that ``verdict`` accepted."""
        if self.parents is None:
            return self.tokens[: verdict.accepted]
        return [self.tokens[node] for node in verdict.path]


class Drafter(Protocol):
    """Proposes for all live rows of a batch at once. Rows are known by their place in the batch. ``watches`` says
    whether it asks a Watch when to stop, ``at_once`` whether all tokens of a draft come of one step, ``rereads``
    whether what was accepted of one is read again with the next, ``late`` how many committed tokens the last draft had
    to make up for (of the row with most of them, and beyond those that one in use lacks at most), ``steps`` how many
    tokens' time it took. Of what it lacks of a row it reads no more than the last ``reach``."""

    watches: bool
    at_once: bool
    rereads: bool
    late: int
    steps: int

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        """Expect these rows, and forget all others."""
        ...

    def unread(self, rows: Items[Row]) -> int:
        """How many tokens ``prefill`` would read."""
        ...

    def forget(self) -> None:
        """Let no later row go on from what the cache holds."""
        ...

    def prefill(self, rows: Items[Row]) -> None:
        """Take in the prompts of the rows that draft with this."""
        ...

    def room(self, row: Row) -> int:
        """The longest draft it can give this row now."""
        ...

    def behind(self, rows: Items[Row]) -> int:
        """How many committed tokens it would have to make up for, as in ``late``."""
        ...

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        """Up to lengths[b] tokens for row b, fewer if ``watch`` says so; an empty draft where that is 0. Commits
        nothing."""
        ...

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        """Row ``place`` kept the first ``accepted`` of its drafts (of a tree, the nodes of ``path``) and got one more
        token."""
        ...

    def move(self, source: int, destination: int) -> None:
        """Row ``source`` now stands at ``destination``, whose row has left."""
        ...
