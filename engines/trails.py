"""How a row with recurrent layers is rolled back by length: its states stay behind, and what came since is kept.

A state (linear attention, state spaces) is what all tokens so far made of it, and none of them can be taken out again.
So each row's states stand at its *anchor*, a length that nobody goes back behind, and a *trail* keeps what its layers
took in of the last tokens. A step on ``past`` tokens carries the states on from anchor to past, by the trail: a few
small products a token, no weight is read. It does so for itself; where the row's first ``past`` tokens are committed
the anchor moves along. All of that is done token by token, so no bit depends on where anchors were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from ..bundle import Recurrence
from ..errors import EngineError
from .memory import HostBuffer

Turn = tuple[int, int]  # how many tokens of the trails a step reads again, which of two buffers has the states
NO_TURN: Turn = (0, 0)
_NOWHERE = sys.maxsize  # the anchor of a row that is being changed: it can but begin anew


class Trails:
    """What ``rows`` rows of a model with ``recurrence`` keep beside their slots, in float32 on the host (None: nothing,
    and nothing is ever asked of it).

    A trail is a ring: the token at position i stands in slot i modulo its length. States are in one of two buffers
    while a step writes the other, and ``_at`` names them together: the buffer that the next step reads, the rows'
    anchors, and which buffer has each row's states (the other one, perhaps, of a row that steps left out: rows that are
    finished are never copied). A step that fails, or is interrupted, has changed nothing that counts.
    """

    def __init__(self, recurrence: Recurrence | None, rows: int) -> None:
        self._rows, self._there = rows, recurrence is not None
        self._kept = kept = recurrence or Recurrence(0, 0, ())
        float32 = np.dtype(np.float32)
        self._trails = [HostBuffer.zeros((rows, 1, kept.slots, width), float32) for width in kept.trails]
        shapes = [(rows, state.heads, state.key_dim, state.value_dim) for state in kept.states]
        self._states = [[HostBuffer.zeros(shape, float32) for shape in shapes] for _ in range(2)]
        self._at = 0, (0,) * rows, (0,) * rows
        self._committed = [0] * rows

    @property
    def anchors(self) -> tuple[int, ...]:
        """The least length that each row can be stepped from, but for 0, where it begins anew."""
        return self._at[1]

    def restart(self) -> None:
        """All rows begin anew."""
        for row in range(self._rows):
            self._begin(row)

    def commit(self, lengths: Sequence[int]) -> None:
        """See CommittingEngine.commit."""
        self._committed[: len(lengths)] = lengths

    def turn(self, past: Sequence[int], width: int) -> Turn:
        """The Turn of a step of ``width`` tokens a row on top of ``past``. Raises EngineError for a length before a
        row's anchor, and for a step that is too wide for the trails."""
        if not self._there:
            return NO_TURN
        if width > self._kept.widest:
            raise EngineError(f"a step of {width} tokens exceeds the {self._kept.widest} that recurrent layers take")
        for row, length in enumerate(past):
            if length < self.anchors[row]:
                if length:
                    raise EngineError(f"row {row} cannot go back to {length} tokens: {self.anchors[row]} are committed")
                self._begin(row)
            if self._at[2][row] != self._at[0]:
                self._fetch(row)
        if not self._kept.states:
            return NO_TURN
        behind = max(length - anchor for length, anchor in zip(past, self.anchors, strict=False))
        return 1 << max(0, behind - 1).bit_length(), self._at[0]

    def took(self, past: Sequence[int], width: int) -> None:
        """The step was taken: the states that it wrote stand at ``past``. They replace the old ones if ``past`` is
        committed in all rows, or if the trails could not hold another step of full width in addition."""
        if not self._there:
            return
        side, anchors, there = self._at
        behind = max(length - anchor for length, anchor in zip(past, anchors, strict=False))
        full = behind + width > self._kept.widest
        if not full and any(length > known for length, known in zip(past, self._committed, strict=False)):
            return
        written = 1 - side
        self._at = written, (*past, *anchors[len(past) :]), (*[written] * len(past), *there[len(past) :])

    def copy_row(self, source: int, destination: int) -> None:
        """See Engine.copy_row."""
        there = self._at[2][source]
        self._place(destination, _NOWHERE, there)
        for buffer in (*self._trails, *self._states[there]):
            buffer.copy_row(source, destination)
        self._committed[destination] = self._committed[source]
        self._place(destination, self.anchors[source], there)

    def bindings(self, side: int) -> Iterator[tuple[str, str, HostBuffer, HostBuffer]]:
        """Of a step that finds its states in buffer ``side``: names of an input and an output of the graph, and the
        buffers that are bound to them."""
        for i, trail in enumerate(self._trails):
            yield f"past_trail.{i}", f"present_trail.{i}", trail, trail
        for i, (old, new) in enumerate(zip(self._states[side], self._states[1 - side], strict=True)):
            yield f"past_state.{i}", f"present_state.{i}", old, new

    def _begin(self, row: int) -> None:
        self._committed[row] = 0
        if self.anchors[row]:  # else its states are zero
            there = self._at[2][row]
            self._place(row, _NOWHERE, there)
            for buffer in self._states[there]:
                buffer.array[row] = 0
            self._place(row, 0, there)

    def _fetch(self, row: int) -> None:
        """Bring a row's states to the buffer that the next step reads."""
        side = self._at[0]
        for buffer, other in zip(self._states[side], self._states[1 - side], strict=True):
            buffer.array[row] = other.array[row]
        self._place(row, self.anchors[row], side)

    def _place(self, row: int, anchor: int, there: int) -> None:
        side, anchors, places = self._at
        self._at = side, (*anchors[:row], anchor, *anchors[row + 1 :]), (*places[:row], there, *places[row + 1 :])
