"""What a draft is, and the interface of what proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from ..prefill import ALL
from ..rules.law import Law
from ..rules.trees import ABSENT, path
from ..rules.verify import Verdict
from ..sequence import Row
from .confidence import Watch


@dataclass(slots=True)
class Draft:
    """Proposed tokens, the laws ``q`` they were drawn from (None: the proposal is deterministic), and the name of the
    drafter, ``by``. There is a law for each token of a chain; in a tree the children of node n were drawn from q[n + 1]
    and those of the root from q[0] (an empty array where a node has no children). ``classes``: how
    sure the drafter was of each token, where a Watch was asked. With ``parents`` the tokens are a tree
    (``rules/trees.py``), else a chain."""

    tokens: list[int] = field(default_factory=list)
    q: list[Law] | None = None
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
    """Proposes for all live rows of a batch at once. Rows are known by their place in the batch.

    ``watches``: it asks a Watch when to stop. ``at_once``: all tokens of a draft come from one step. ``rereads``: the
    accepted tokens of a draft are read again with the next draft. ``late``: how many committed tokens, beyond the one
    or two that are usual, the last draft had to read first (for the row that lacked most). ``steps``: how many tokens
    the last draft took the time of. Of the text that it has not read, a drafter reads at most the last ``reach``
    tokens."""

    watches: bool
    at_once: bool
    rereads: bool
    late: int
    steps: int

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        """Start over with these rows; forget all others."""
        ...

    def unread(self, rows: Items[Row]) -> int:
        """How many tokens ``prefill`` would read."""
        ...

    def forget(self) -> None:
        """Let no later row go on from what the cache holds."""
        ...

    def prefill(self, rows: Items[Row]) -> None:
        """Read the prompts of the rows that this drafts for."""
        ...

    def room(self, row: Row) -> int:
        """The longest draft that it can make for this row now."""
        ...

    def behind(self, rows: Items[Row]) -> int:
        """What ``late`` would be for a draft made now."""
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
