"""Decides how a row of logits becomes a distribution: one chain, for draft rows and target rows alike."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engines.base import LogitRow, Logits, Tokens, Tops
from ..grammar import Grammar
from ..settings import Rule, Settings
from ..vocabulary import MappedRow
from . import buffers
from .heads import loudest, not_finite, nothing_left, tops_of, winner
from .law import Few, Law, Probs, draw_and_sum, mass_of, over, whole
from .noise import FEW, SHORT, Noise, Purpose
from .nucleus import largest, nucleus_edge, nucleus_end
from .tally import Tally

Scores = NDArray[np.floating[Any]]
Kept = NDArray[np.bool_]

_LOW, _HIGH = -20.0, 60.0  # if the largest logit is between these, exp needs no shift: nothing over- or underflows


class Chain:
    """The processors of one request, in this order, each skipped when off. Before all of them, what a ``grammar``
    forbids behind the output and the draft so far gets -inf: to the others these tokens do not exist.

    1. ``min_new_tokens``: the ``ends`` get -inf while fewer tokens than that stand before the position
    2. ``logit_bias``: added
    3. ``repetition_penalty`` (CTRL, 1909.05858): for every token of the prompt, the output and the draft so far,
       a positive logit is divided by it and a negative one multiplied
    4. ``presence_penalty`` and ``frequency_penalty * count``: subtracted, over the output and the draft so far
    5. ``temperature``: divided by
    6. ``top_k``: tokens at least as likely as the k-th; 7. ``top_p``: the smallest set of the most likely whose mass
       reaches p; 8. ``min_p``: tokens at least min_p times as likely as the first

    A token exactly as likely as the last one kept by 6, 7 or 8 is kept too, so that the result does not depend on the
    order of ids. At temperature 0 only 1-4 apply. ``drafted`` is always what the draft put between the committed
    text and the position of the row: penalties and the grammar see it.

    What comes of a row of logits is of their dtype, and as exact as they are: float32 of an engine that computes.
    (Float64 would add digits that no such logit has, and take twice the time for a row of 151,936 tokens.) Of few
    tokens that top_k leaves it is Python's float64.
    """

    def __init__(
        self,
        settings: Settings,
        vocab_size: int,
        prompt: Sequence[int],
        ends: Collection[int],
        grammar: Grammar | None = None,
    ) -> None:
        self.settings, self.grammar = settings, grammar
        self.generated = 0
        self._ends = np.array(sorted(end for end in ends if end < vocab_size), np.int64)
        self._bias_ids = np.array(list(settings.logit_bias), np.int64)
        self._bias = np.array(list(settings.logit_bias.values()), np.float64)
        self._repeats = settings.repetition_penalty != 1.0
        self._counts_tokens = settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0
        self._seen, self._written = Tally(prompt if self._repeats else ()), Tally()
        self._cuts = settings.top_p < 1.0 or settings.min_p > 0.0
        self._whole = not self._cuts and settings.top_k == 0
        self._raw = not (self._repeats or self._counts_tokens or settings.logit_bias)

    def fork(self) -> Chain:
        """A copy with a history of its own."""
        other = copy.copy(self)
        other._seen, other._written = self._seen.fork(), self._written.fork()
        other.grammar = None if self.grammar is None else self.grammar.fork()
        return other

    def extend(self, tokens: Sequence[int]) -> None:
        """Take committed tokens into the history."""
        if self.grammar is not None:
            self.grammar.extend(tokens)
        self.generated += len(tokens)
        if self._repeats:
            self._seen.extend(tokens)
        if self._counts_tokens:
            self._written.extend(tokens)

    def is_plain(self, drafted: Sequence[int]) -> bool:
        """Whether nothing but the temperature applies to the logits after ``drafted``."""
        return self.grammar is None and self.is_bare(drafted)

    def is_bare(self, drafted: Sequence[int]) -> bool:
        """Whether nothing but the temperature and the grammar applies to them."""
        return self._whole and not self._adds(drafted)

    def looks_at_ids(self, drafted: Sequence[int] = ()) -> bool:
        """Whether any processor treats tokens differently by their ids at this position."""
        return self.grammar is not None or self._adds(drafted)

    def _adds(self, drafted: Sequence[int]) -> bool:
        """Whether processors 1-4 do anything at this position."""
        return not self._raw or self.generated + len(drafted) < self.settings.min_new_tokens

    def best(self, logits: LogitRow, drafted: Sequence[int] = ()) -> int:
        """The greedy token: the lowest id among the most likely after processors 1-4."""
        if not self.looks_at_ids(drafted):
            token = int(logits.argmax())
            if not math.isfinite(logits[token]):
                raise not_finite()
            return token
        if self.grammar is not None and self._raw:
            return self._best_allowed(self.grammar, logits, drafted)
        scores = self._penalised(logits, drafted)
        token = int(scores.argmax())
        if not math.isfinite(scores[token]):
            raise nothing_left(logits)
        return token

    @staticmethod
    def _best_allowed(grammar: Grammar, logits: LogitRow, drafted: Sequence[int]) -> int:
        """The likeliest token is usually allowed, and to ask for one token takes less time than to ask for all."""
        token = int(logits.argmax())
        if not math.isfinite(logits[token]):
            raise not_finite()
        return token if grammar.allows(token, drafted) else int(grammar.within(logits, drafted).argmax())

    def weights(self, logits: LogitRow, drafted: Sequence[int] = ()) -> Probs:
        """p / max p after processors 1-4 [V]: the law before any temperature."""
        row = self._biased(logits, drafted)
        return powers(below(row, self._top(row, logits)))

    def scores(self, logits: LogitRow, drafted: Sequence[int] = ()) -> Scores:
        """log p up to a constant [V], -inf where p is 0; the largest is 0. Needs temperature > 0."""
        ids, scores = self.left(logits, drafted)
        return scores if ids is None else buffers.spread(ids, scores, logits.size, -math.inf)

    def left(self, logits: LogitRow, drafted: Sequence[int] = ()) -> tuple[Tokens | None, Scores]:
        """The same for tokens that top_k leaves, and which these are, in order (None: all there are)."""
        ids, row, top = self._leading(logits, drafted)
        if ids is not None and ids.size <= FEW:
            few = self._few(ids, row, top)
            return np.array(list(few)), np.array(list(few.values()))
        scores = self._tempered(row, top)
        if self._cuts:
            scores = np.where(self._kept(scores, powers(scores)), scores, -math.inf)
        return ids, scores

    def masses(self, logits: LogitRow, drafted: Sequence[int] = ()) -> Law:
        """p up to a factor: [V], or what settings leave, where that is few tokens. Needs temperature > 0."""
        if self.settings.temperature == 1.0 and self.is_bare(drafted):
            row = self._allowed(logits, drafted)
            if _LOW < row.item(row.argmax()) < _HIGH:
                return powers(row)
        ids, row, top = self._leading(logits, drafted)
        if ids is not None and ids.size <= FEW:
            few = self._few(ids, row, top)
            return Few.of(few, map(math.exp, few.values()))
        scores = self._tempered(row, top)
        weights = powers(scores)
        if self._cuts:
            kept = self._kept(scores, weights)
            if np.count_nonzero(kept) <= FEW:
                ids, weights = kept.nonzero()[0] if ids is None else ids[kept], weights[kept]
            else:
                weights *= kept  # where masks are as irregular as these, what branches takes ten times as long
        if ids is None:
            return weights
        if ids.size > FEW:
            return buffers.spread(ids, weights, logits.size, 0.0)
        return Few.of(ids.tolist(), weights.tolist())

    def law(self, logits: LogitRow, drafted: Sequence[int] = ()) -> Law:
        """The same, summing to 1."""
        masses = self.masses(logits, drafted)
        return over(masses, mass_of(masses))

    def distribution(self, logits: LogitRow, drafted: Sequence[int] = ()) -> Probs:
        """The same, and [V] in any case."""
        return whole(self.law(logits, drafted), logits.size)

    def distributions(self, logits: Logits, drafted: Sequence[int]) -> Sequence[Probs] | None:
        """``distribution(logits[i], drafted[:i])`` of i = 0..len(drafted), for ``logits`` [> len(drafted), V], of short
        rows: a call that finds nothing in the cache takes longer than its numbers. None where a row is too dear to be
        worked out before somebody asks for it, or is no law: perhaps nobody does."""
        if not isinstance(logits, np.ndarray) or logits.shape[-1] > SHORT or not self.is_plain(()):
            return None
        rows = logits[: len(drafted) + 1]
        tops = np.maximum.reduce(rows, axis=1, keepdims=True)
        if not math.isfinite(np.add.reduce(tops, axis=None)):
            return None
        scores = rows - tops
        if self.settings.temperature != 1.0:
            scores /= self.settings.temperature
        probs: Probs = np.exp(scores, out=scores)
        probs /= np.add.reduce(probs, axis=1, keepdims=True)
        return list(probs)

    def _few(self, ids: Tokens, row: Scores, top: float) -> dict[int, float]:
        """What top_p and min_p leave of few tokens, with their scores: for these, Python takes less time than numpy."""
        settings = self.settings
        scores = [(logit - top) / settings.temperature for logit in row.tolist()]
        least = math.log(settings.min_p) if settings.min_p > 0.0 else -math.inf
        if settings.top_p < 1.0:
            least = max(least, nucleus_end(scores, settings.top_p))
        return {token: score for token, score in zip(ids.tolist(), scores, strict=True) if score >= least}

    def _tempered(self, row: Scores, top: float) -> Scores:
        """The scores of a ``row`` whose largest logit is ``top``."""
        scores = below(row, top)
        if self.settings.temperature != 1.0:
            scores /= self.settings.temperature
        return scores

    def _leading(self, logits: LogitRow, drafted: Sequence[int]) -> tuple[Tokens | None, Scores, float]:
        """What top_k leaves (None: all tokens), what processors 1-4 make of its logits, and the largest of these."""
        k = self.settings.top_k if self.settings.top_k < logits.size else 0
        if k and not self.looks_at_ids(drafted) and (tops := tops_of(logits)) is not None:
            ids, row = tops
            if k < row.size and row[k - 1] > row[-1]:  # no token outside is as likely as the k-th
                order = ids[: np.count_nonzero(row >= row[k - 1])].argsort()
                return ids[order], row[order], float(row[0])
        row = self._biased(logits, drafted)
        top = self._top(row, logits)
        if not k:
            return None, row, top
        ids = largest(row, k)
        return ids, row[ids], top

    def _kept(self, scores: Scores, weights: Probs) -> Kept:
        """Which of ``weights`` = e^scores top_p and min_p leave."""
        least = 0.0 if self.settings.top_p == 1.0 else nucleus_edge(weights, self.settings.top_p)
        kept: Kept = weights >= least
        if self.settings.min_p > 0.0:
            kept &= scores >= math.log(self.settings.min_p)
        return kept

    @staticmethod
    def _top(row: Scores, logits: LogitRow) -> float:
        """The largest of ``row``, which was made of ``logits``. (``max`` has more overhead than ``argmax``.)"""
        if not math.isfinite(top := float(row[row.argmax()])):
            raise nothing_left(logits)
        return top

    def _biased(self, logits: LogitRow, drafted: Sequence[int]) -> Scores:
        """The logits after processors 1-4; not to be written to."""
        return self._penalised(logits, drafted) if self._adds(drafted) else self._allowed(logits, drafted)

    def _allowed(self, logits: LogitRow, drafted: Sequence[int]) -> Scores:
        return np.asarray(logits if self.grammar is None else self.grammar.within(logits, drafted))

    def _penalised(self, logits: LogitRow, drafted: Sequence[int]) -> Scores:
        row = self._allowed(logits, drafted)
        scores = buffers.like(row)
        scores[:] = row
        settings = self.settings
        if self.generated + len(drafted) < settings.min_new_tokens:
            scores[self._ends] = -math.inf
        if self._raw:
            return scores
        if settings.logit_bias:
            scores[self._bias_ids] += self._bias
        if self._repeats:
            seen, penalty = self._seen.behind(drafted)[0], settings.repetition_penalty
            before, either = scores[seen], np.minimum if penalty > 1.0 else np.maximum
            scores[seen] = either(before / penalty, before * penalty)  # the quotient above 0, the product below
        if self._counts_tokens:
            written, counts = self._written.behind(drafted)
            scores[written] -= settings.frequency_penalty * counts + settings.presence_penalty
        return scores


class Sampler:
    """One request's rule, chain and noise: the same choice for a draft's row and a target's."""

    def __init__(self, rule: Rule, chain: Chain, noise: Noise) -> None:
        self.rule, self.chain, self.noise = rule, chain, noise

    @property
    def deterministic(self) -> bool:
        """Whether a draft model's tokens follow from seed and text, so that there is no q to test them against."""
        return self.rule == "coupled" or self.chain.settings.temperature == 0

    def choose(self, logits: LogitRow, drafted: Sequence[int], position: int) -> int:
        """What stands at ``position`` without any draft, under ``coupled`` and at temperature 0.

        Coupled: argmax of log p plus the position's Gumbel noise, which has exactly the law p (Gumbel-max).
        """
        if self.chain.settings.temperature == 0:
            return self.chain.best(logits, drafted)
        if (token := self._from_head(tops_of(logits), drafted, position, logits.size)) is not None:
            return token
        if logits.size > SHORT:
            return self._loudest(logits, drafted, position)
        return int(self.noisy(logits, drafted, position).argmax())

    def _loudest(self, logits: LogitRow, drafted: Sequence[int], position: int) -> int:
        """``noisy(...).argmax()``, for which the noise of few tokens is worked out."""
        chain, size = self.chain, logits.size
        if chain.is_bare(drafted):
            token = loudest(np.asarray(logits), chain.settings.temperature, *self.noise.raw(position, size))
            if chain.grammar is None or chain.grammar.allows(token, drafted):
                return token
        ids, scores = chain.left(logits, drafted)
        return self._heard(scores, ids, position, size)

    def _heard(self, scores: Scores, ids: Tokens | None, position: int, size: int) -> int:
        """Which of the tokens ``ids`` of a row [``size``] (None: of all) has the largest of ``scores`` and noise
        together; the first among equals."""
        possible = scores > -math.inf
        if size <= SHORT or np.count_nonzero(possible) <= FEW:
            few = np.flatnonzero(possible)
            noise = self.noise.gumbel_of(position, size, few if ids is None else ids[few])
            place = int(few[(scores[few] + noise).argmax()])
        else:
            uniforms, peak = self.noise.raw(position, size)
            if ids is not None:
                uniforms = uniforms[ids]
                peak = int(uniforms.argmax())
            place = loudest(scores, 1.0, uniforms, peak)
        return place if ids is None else int(ids[place])

    def _from_head(self, tops: Tops | None, drafted: Sequence[int], position: int, size: int) -> int | None:
        if tops is None or not self.chain.is_plain(drafted):
            return None
        return winner(*tops, self.chain.settings.temperature, self.noise.gumbel(position, size))

    def noisy(self, logits: LogitRow, drafted: Sequence[int], position: int) -> NDArray[np.float64]:
        """What ``coupled`` takes the largest of, float64 [V]."""
        noise = self.noise.gumbel(position, logits.size)
        return np.add(self.chain.scores(logits, drafted), noise, dtype=np.float64)

    def propose(self, logits: LogitRow, drafted: Sequence[int], start: int) -> tuple[int, Law | None]:
        """A draft model's next token after ``drafted`` in the round at ``start``, and the q it was drawn from."""
        sampled = self.chain.settings.temperature > 0
        if isinstance(logits, MappedRow) and sampled and not self.chain.looks_at_ids(drafted):
            return self._propose_among(logits, drafted, start)
        if self.deterministic:
            return self.choose(logits, drafted, start + len(drafted)), None
        masses = self.chain.masses(logits, drafted)
        token, mass = draw_and_sum(masses, self.noise.uniforms(start, Purpose.DRAFT, len(drafted) + 1)[-1])
        return token, over(masses, mass)

    def _propose_among(self, row: MappedRow, drafted: Sequence[int], start: int) -> tuple[int, Law | None]:
        """The same from the few logits that a draft gives: the target's other tokens have no chance."""
        if self.rule == "coupled":
            places, scores = self.chain.left(row.kept, drafted)
            ids = row.ids if places is None else row.ids[places]
            return self._heard(scores, ids, start + len(drafted), row.size), None
        masses = self.chain.masses(row.kept, drafted)
        place, mass = draw_and_sum(masses, self.noise.uniforms(start, Purpose.DRAFT, len(drafted) + 1)[-1])
        q = over(masses, mass)
        if isinstance(q, Few):
            return int(row.ids[place]), Few.of(row.ids[list(q)].tolist(), q.values())
        return int(row.ids[place]), buffers.spread(row.ids, q, row.size, 0.0)


def below(row: Scores, top: float) -> Scores:
    """``row`` minus ``top``. As few numpy calls as possible make a law: after a step of the target the cache is cold,
    and each call takes ten times as long as in a loop."""
    scores: Scores = np.subtract(row, top, out=buffers.like(row))
    return scores


def powers(scores: Scores) -> Probs:
    """e^scores."""
    weights: Probs = np.exp(scores, out=buffers.like(scores))
    return weights
