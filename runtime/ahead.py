"""Decides what the draft model does while the target verifies: the next draft, as if this one were kept whole.

Kept where the text then is what was supposed, dropped where not. A draft is a function of the text before it and of
noise that is keyed by position and purpose: what is kept is what would have been drafted anyway, so no rule can tell
(under ``rejection`` and ``block`` each token goes with the q it was drawn from, as ever). The guess at the target's
bonus token only says which text to suppose: however it is made, it biases nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter

import numpy as np

from ..bundle import ModelEntry
from ..engines.base import LogitRow
from ..engines.worker import Outcome, Worker
from ..errors import UsageError, shown
from .controller.costs import Costs, context_bucket
from .drafters.base import Draft
from .drafters.confidence import Watch
from .drafters.feature_drafter import FeatureDrafter
from .drafters.foreign_draft import ForeignDrafter
from .drafters.model_drafter import ModelDrafter
from .held import agreement
from .prefill import ALL
from .rules.law import Law, draw
from .rules.noise import Purpose
from .rules.sampling import Sampler
from .sequence import Row
from .settings import DraftAhead
from .vocabulary import VocabularyMap

_STRETCH, _SKIPPED, _OUTLIERS = 16, 2, 2
_FIRST_REST, _LONGEST_REST = 128, 1024
_CANNOT = "draft_ahead: {what} cannot (possible: False or 'auto')"
_OTHER_TOKENIZER = _CANNOT.format(what="a draft with another tokenizer")
_AT_ONCE = _CANNOT.format(what="a draft model that says its drafts in one step")
_RECURRENT = _CANNOT.format(what="a draft model with recurrent layers")
_FEATURES = _CANNOT.format(what="a head that reads its target's features")


def check_ahead(
    wanted: DraftAhead, providers: Collection[str], *, draft: ModelEntry | None, vocabulary: VocabularyMap | None
) -> DraftAhead:
    """What this setting of ``load`` comes to where the models run on ``providers``: "auto" is off where both share a
    device (on one GPU, too, they are in each other's way: docs/edge.md). Raises UsageError for what is no setting, and
    where it cannot be."""
    if isinstance(wanted, np.bool_):
        wanted = bool(wanted)
    if not isinstance(wanted, bool) and not (isinstance(wanted, str) and wanted == "auto"):
        raise UsageError(f"draft_ahead must be True, False or 'auto', not {shown(wanted)}")
    if wanted is True and draft is None:
        raise UsageError("draft_ahead: this bundle has no draft model (possible: False or 'auto')")
    if wanted is True and vocabulary is not None and vocabulary.tokenizers is not None:
        raise UsageError(_OTHER_TOKENIZER)
    if wanted is True and draft is not None and draft.mask_token is not None:
        raise UsageError(_AT_ONCE)
    if wanted is True and draft is not None and draft.reads_features:
        raise UsageError(_FEATURES)
    if wanted is True and draft is not None and draft.recurrence is not None:
        raise UsageError(_RECURRENT)
    return False if wanted == "auto" and len(set(providers)) == 1 else wanted


def drafts_ahead(model: ModelDrafter, costs: Costs, wanted: DraftAhead) -> AheadDrafter | None:
    """``model``, drafting ahead if that is ``wanted`` ("auto": and possible, and seen to pay). Raises UsageError for a
    draft with another tokenizer, which cuts its text anew each round, so that there is nothing to keep; and for one
    whose step is a whole draft, of which there is nothing to go on with; and for a head, which has to be told first
    what its target knows; and for recurrent layers, from which a draft and the one made ahead of the next round cannot
    both be taken back."""
    if wanted is True and not model.resumes:
        raise UsageError(_why(model))
    return AheadDrafter(model, costs, measured=wanted == "auto") if wanted and model.resumes else None


def _why(model: ModelDrafter) -> str:
    if isinstance(model, ForeignDrafter):
        return _OTHER_TOKENIZER
    return _FEATURES if isinstance(model, FeatureDrafter) else _AT_ONCE if model.at_once else _RECURRENT


@dataclasses.dataclass(slots=True)
class _Run:
    """Drafting ahead for ``row``, begun when its text had ``start`` tokens. ``supposed`` are the tokens that the round
    is supposed to commit (its drafts, then the bonus token once that is guessed), ``draft`` is the next draft, made
    after them."""

    row: Row
    start: int
    supposed: list[int]
    draft: Draft


class AheadDrafter:
    """A ModelDrafter that goes on drafting, in a thread of its own, while the target steps.

    It does so only while a single row is live (a step of a batch is a rectangle: one row that was guessed wrong makes
    it as long as if all were), and never where the draft is a tree, for hardly any branch is kept whole. ``tried``
    counts the rounds in which it drafted ahead, ``kept`` those of these drafts that were used.
    """

    watches = True
    at_once = rereads = False

    def __init__(self, model: ModelDrafter, costs: Costs, *, measured: bool) -> None:
        """``measured``: only while it is seen to pay; else always."""
        self._model, self._worth = model, Worth(costs) if measured else None
        self.late = self.steps = self.tried = self.kept = 0
        self._stop = False
        self._worker = Worker("leadout-ahead")
        self._run: _Run | None = None
        self._seconds = 0.0

    def counts(self) -> dict[str, int]:
        """``tried`` and ``kept``."""
        return {"tried": self.tried, "kept": self.kept}

    def rest(self) -> None:
        """Stop drafting ahead and wait until the worker is idle. (A caller that was interrupted during a step of the
        worker did not wait for its end.)"""
        self._stop = True
        self._worker.rest()

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        self._run = None
        self._model.reset(rows, reach)

    def unread(self, rows: Items[Row]) -> int:
        return self._model.unread(rows)

    def forget(self) -> None:
        """See Drafter.forget. The thread ends, too, until there is something to draft."""
        self._model.forget()
        self._worker.close()

    def prefill(self, rows: Items[Row]) -> None:
        self._model.prefill(rows)

    def room(self, row: Row) -> int:
        return self._model.room(row)

    def behind(self, rows: Items[Row]) -> int:
        return self._model.behind(rows)

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        began = perf_counter()
        if len(rows) == 1:
            drafts = [self._model.resume(rows[0], lengths[0], self._settle(lengths[0]), watch)]
        else:
            drafts = self._model.propose(rows, lengths, watch)
        self.late, self.steps = self._model.late, self._model.steps
        self._seconds = perf_counter() - began
        return drafts

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        if self._run is None:  # else the next proposal compares texts
            self._model.observe(place, accepted, path)

    def move(self, source: int, destination: int) -> None:
        self._model.move(source, destination)

    @contextmanager
    def meanwhile(self, rows: Items[Row], drafts: Items[Draft]) -> Iterator[None]:
        """Draft ahead during the target's step that verifies ``drafts``; the worker is idle before and after it.
        Raises what the draft model raised, unless the step itself raises."""
        began = perf_counter()
        work = self._begin(rows, drafts)
        try:
            yield
        except BaseException:
            self._end(work)
            raise
        if (error := self._end(work)) is not None:
            raise error
        if self._worth is not None and len(rows) == 1 and drafts[0].by == "model" and drafts[0].tokens:
            took = self._seconds + perf_counter() - began
            self._worth.record(len(drafts[0].tokens), took, rows[0].sequence.cached)

    def _begin(self, rows: Items[Row], drafts: Items[Draft]) -> Outcome | None:
        (row, *others), draft = rows, drafts[0]
        if others or draft.by != "model" or not draft.tokens or draft.parents is not None:
            return None
        if self._worth is not None and not self._worth.on:
            return None
        longest = self._longest(row, draft)
        if longest <= 0 or row.sequence.ends.intersection(draft.tokens):
            return None
        self.tried += 1
        self._model.keep(0, row.sequence.cached + len(draft.tokens))  # a draft made ahead may have been cut
        self._run = _Run(row, row.sequence.length, list(draft.tokens), Draft())
        self._stop = False
        return self._worker.begin(partial(self._work, self._run, longest))

    def _longest(self, row: Row, draft: Draft) -> int:
        """The next draft is likely to be as long as this one, unless the text or the draft's context ends before."""
        committed = len(draft.tokens) + 1
        return min(len(draft.tokens), row.sequence.room - committed - 1, self._model.room(row) - committed)

    def _end(self, work: Outcome | None) -> BaseException | None:
        """Stop the worker after the step it is in. Returns what ``work`` raised, if anything."""
        self._stop = True
        return None if work is None else work.get()

    def _work(self, run: _Run, longest: int) -> None:
        with suppress(UsageError):  # nothing may follow what is supposed: a text that comes to that is told so there
            self._go_on(run, longest)

    def _go_on(self, run: _Run, longest: int) -> None:
        if self._stop:
            return
        supposed = suppose(run.row, run.supposed)
        supposed.sampler = Foresight(supposed.sampler, run.start)
        if not (guessed := self._model.propose([supposed], [1])[0].tokens):
            return  # it can say nothing that may follow
        run.supposed += guessed
        supposed = suppose(run.row, run.supposed)
        for length in range(1, longest + 1):
            if self._stop or len(run.draft.tokens) < length - 1:
                return
            self._model.resume(supposed, length, run.draft)

    def _settle(self, length: int) -> Draft:
        """The draft that was made ahead for the only row, if the text went on as supposed; else an empty draft."""
        run, self._run = self._run, None
        if run is None:
            return Draft()
        committed = run.row.sequence.tokens[run.start :]
        if committed != run.supposed:
            same = agreement(committed, [*run.supposed, *run.draft.tokens])
            self._model.keep(0, min(run.start + same, run.row.sequence.cached))
            return Draft()
        self.kept += bool(run.draft.tokens)
        q = run.draft.q
        return Draft(run.draft.tokens[:length], q and q[:length])


class Foresight(Sampler):
    """Guesses which token the target will add in the round at ``start`` if it keeps every draft: the draft's own choice
    where the rule is deterministic; else the token that the target's random number for it draws from q instead of p."""

    def __init__(self, sampler: Sampler, start: int) -> None:
        super().__init__(sampler.rule, sampler.chain, sampler.noise)
        self._start = start

    def propose(self, logits: LogitRow, drafted: Items[int], start: int) -> tuple[int, Law | None]:
        if self.deterministic:
            return self.choose(logits, drafted, start + len(drafted)), None
        q = self.chain.law(logits, drafted)
        return draw(q, self.noise.uniforms(self._start, Purpose.FINAL, 1)[0]), q


def suppose(row: Row, tokens: Items[int]) -> Row:
    """``row`` as if ``tokens`` were committed, for as long as its text stays as it is. Of its mutable parts only the
    noise is shared with it, and the matcher of a grammar, which goes back where it was."""
    chain = row.sampler.chain.fork()
    chain.extend(tokens)
    sequence = dataclasses.replace(row.sequence, tokens=[*row.sequence.tokens, *tokens])
    return dataclasses.replace(row, sequence=sequence, sampler=Sampler(row.sampler.rule, chain, row.sampler.noise))


class Worth:
    """Whether drafting ahead pays on this device. Two stretches of rounds are compared, one without it and one with it;
    each round counts as its seconds divided by those that the cost table gives a round without it (drafts differ in
    length). The faster way is used from then on, and compared again after 128 rounds, then 256, up to 1024, for as
    long as it stays the faster one.

    The first rounds of a stretch do not count (a draft that is kept saves time in the round after), nor do its two
    slowest (first calls at a new shape). The cost table is copied before the stretches, because later measurements
    would include the effect of drafting ahead.
    """

    def __init__(self, costs: Costs) -> None:
        self.on = self._better = False
        self._costs = self._before = costs
        self._expected: dict[int, list[float]] = {}
        self._ratios: dict[bool, list[float]] = {}
        self._left, self._rest = _STRETCH, _FIRST_REST  # costs are measured first

    def record(self, length: int, seconds: float, past: int = 0) -> None:
        """A round on a context of ``past`` tokens, whose draft model drafted ``length`` tokens, took ``seconds`` for
        draft and target together."""
        if not self._ratios:
            self._left -= 1
            if self._left <= 0:
                self.on, self._ratios = False, {False: []}
                self._before, self._expected = Costs(self._costs.entries()), {}
            return
        ratios = self._ratios[self.on]
        ratios.append(seconds / self._price(past)[length])
        if len(ratios) == _SKIPPED + _STRETCH:
            if self.on:
                self._decide()
            else:
                self.on, self._ratios[True] = True, []

    def _price(self, past: int) -> list[float]:
        """Seconds of a round with drafts of 0, 1, 2, ... that is not worked on ahead."""
        bucket = context_bucket(past)
        if bucket not in self._expected:
            drafts, target = self._before.drafts(1, past), self._before.target(1, past) or []
            self._expected[bucket] = [draft + step for draft, step in zip(drafts, target[1:], strict=False)]
        return self._expected[bucket]

    def _decide(self) -> None:
        without, with_it = (sum(sorted(self._ratios[on][_SKIPPED:])[:-_OUTLIERS]) for on in (False, True))
        self.on = with_it < without
        self._rest = min(2 * self._rest, _LONGEST_REST) if self.on == self._better else _FIRST_REST
        self._better, self._left, self._ratios = self.on, self._rest, {}
