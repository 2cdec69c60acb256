"""A toy target that gives features and toy heads that read them, a token at a time or for a block: whatever is read
beside the wrong token, of the wrong row, or from a slot that is stale, gives another law, or is found out at once."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from support_runtime import FixedCosts, collect

from leadout.engines.base import BLOCK, PADDING, TEXT
from leadout.engines.toy import ToyEngine
from leadout.runtime.decoder import Decoder
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings

ROWS = 251


def chained(before: int, token: int) -> int:
    """The digest of a text whose last token is ``token``, from that of the text before it: exact in float32."""
    return zlib.crc32(np.array([before, token]).tobytes()) % (1 << 20)


def digests(text: Any) -> list[int]:
    found, last = [], 0
    for token in text:
        found.append(last := chained(last, int(token)))
    return found


class Laws:
    """p: by the digest of the text. q: the same, and a share of a law by the digests of all tokens but the first."""

    def __init__(self, vocab: int, share: float = 0.3, seed: int = 1, sharpness: float = 2.0) -> None:
        weights = np.exp(sharpness * np.random.default_rng(seed).normal(size=(2, ROWS, vocab)))
        self.tables, self.vocab, self.share = weights / weights.sum(-1, keepdims=True), vocab, share

    def p(self, context: Any) -> np.ndarray:
        return self.tables[0, digests(context)[-1] % ROWS]

    def q(self, read: list[int]) -> np.ndarray:
        """Of the digests of the tokens read, the last one's text at its end."""
        other = zlib.crc32(np.array(read).tobytes()) % ROWS
        return (1 - self.share) * self.tables[0, read[-1] % ROWS] + self.share * self.tables[1, other]

    def q_of(self, context: Any) -> np.ndarray:
        """What the head says that has read all of a text."""
        return self.q(digests(context)[1:] or [0])

    def target(self, context: int = 256) -> FeatureToy:
        return FeatureToy(self, reads=False, max_context=context)

    def head(self, context: int = 256) -> FeatureToy:
        return FeatureToy(self, reads=True, max_context=context)


class FeatureToy(ToyEngine):
    """Its features of a token are the digest of the text up to it, and whether a head guessed that (1) or not (0)."""

    def __init__(self, laws: Laws, *, reads: bool, max_context: int) -> None:
        super().__init__(laws.p, laws.vocab, max_context=max_context)
        self.laws = laws
        self.spec = dataclasses.replace(self.spec, features=2, reads_features=reads, trees=not reads)
        self.given = np.full((1, 0, 2), np.nan, np.float32)
        self.guessed = np.full((1, 0), np.nan)  # beside what the slots of a head were read
        self._beside: Any = None

    def features(self, row: int, start: int, stop: int) -> np.ndarray:
        found = self.given[row, start:stop]
        assert found.shape[0] == stop - start and not np.isnan(found).any(), (
            "features of slots that no step has written"
        )
        return found

    def beside(self, features: np.ndarray) -> None:
        self._beside = np.array(features, np.float32)

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        rows, width = tokens.shape
        read, self._beside = self._beside, None
        assert (read is not None) == self.spec.reads_features, "a head is told anew before each of its steps"
        for row, past in enumerate(past_lens.tolist()):
            for column in range(width):
                token, slot = int(tokens[row, column]), past + column
                if read is not None:
                    assert read.shape == (rows, width, 2)
                    before, self.guessed[row, slot] = int(read[row, column, 0]), read[row, column, 1]
                else:
                    before = int(self.given[row, slot - 1, 0]) if slot else 0
                self.given[row, slot] = chained(before, token), self.spec.reads_features
        return super().forward(tokens, past_lens, logit_index)

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        more = ((0, 0), (0, self.capacity - self.given.shape[1]))
        self.given = np.pad(self.given, (*more, (0, 0)), constant_values=np.nan)
        self.guessed = np.pad(self.guessed, more, constant_values=np.nan)

    def reset(self, batch: int) -> None:
        super().reset(batch)
        self.given = np.full((batch, self.capacity, 2), np.nan, np.float32)
        self.guessed = np.full((batch, self.capacity), np.nan)

    def copy_row(self, source: int, destination: int) -> None:
        super().copy_row(source, destination)
        self.given[destination], self.guessed[destination] = self.given[source], self.guessed[source]

    def compact(self, row: int, past_len: int, kept: Any) -> None:
        super().compact(row, past_len, kept)
        self.given[row, past_len : past_len + len(kept)] = self.given[row, [past_len + slot for slot in kept]]

    def _logits(self, row: int, context: Any) -> np.ndarray:
        if not self.spec.reads_features:
            return super()._logits(row, context)
        if (context < 0).any():
            return super()._logits(row, context)
        with np.errstate(divide="ignore"):
            return np.log(self.laws.q([int(digest) for digest in self.given[row, : context.size, 0]]))


class BlockLaws(Laws):
    """q of the j-th token behind a text: for the most part p behind what is likeliest until there, for the rest a law
    of all of the text and of how long the block is."""

    def behind(self, told: list[int], anchor: int, place: int, block: int) -> np.ndarray:
        last = chained(told[-1] if told else 0, anchor)
        for _ in range(place - 1):
            last = chained(last, int(self.tables[0, last % ROWS].argmax()))
        other = zlib.crc32(np.array([*told, anchor, place, block]).tobytes()) % ROWS
        return (1 - self.share) * self.tables[0, last % ROWS] + self.share * self.tables[1, other]

    def target(self, context: int = 256) -> FeatureToy:
        return BlockToy(self, reads=False, max_context=context)

    def head(self, context: int = 256, most: int | None = 7) -> FeatureToy:
        made = BlockToy(self, reads=True, max_context=context)
        made.spec = dataclasses.replace(made.spec, mask_token=self.vocab, block=most)
        return made


class BlockToy(FeatureToy):
    """Its features of a token are the digest of the text up to it, and that it is text. The head is told as much of
    each row, and whatever it is told beside another token is found out at once."""

    def forward(self, tokens, past_lens, logit_index=None):
        if not self.spec.reads_features:
            found = super().forward(tokens, past_lens, logit_index)
            self.given[:, :, 1] = TEXT
            return found
        read, self._beside = self._beside, None
        rows, width = tokens.shape
        assert read.shape == (rows, width, 2), "a head is told anew before each of its steps"
        for row, past in enumerate(past_lens.tolist()):
            for column in range(width):
                slot, token, (digest, kind) = past + column, int(tokens[row, column]), read[row, column].tolist()
                before = self.given[row, slot - 1] if slot else np.array([0, TEXT])
                assert kind in (TEXT, BLOCK, PADDING) and (kind == TEXT or digest == 0)
                assert kind != TEXT or before[1] == TEXT, "text behind a block"
                assert kind != TEXT or slot == 0 or digest == chained(int(before[0]), token), "another token's"
                assert kind != BLOCK or before[1] == TEXT or token == self.laws.vocab, "a block of other tokens"
                self.given[row, slot] = digest, kind
            self.given[row, past + width :, 1] = PADDING
        return super(FeatureToy, self).forward(tokens, past_lens, logit_index)

    def _logits(self, row, context):
        if not self.spec.reads_features:
            return super()._logits(row, context)
        kinds = self.given[row, :, 1].tolist()
        texts, place = kinds.index(BLOCK) if BLOCK in kinds else len(context), len(context) - 1
        if place <= texts or kinds[place] == PADDING:
            return np.full(self.spec.vocab_size, np.nan)  # what stands there is nobody's to look at
        told = [int(digest) for digest in self.given[row, :texts, 0]]
        with np.errstate(divide="ignore"):
            return np.log(self.laws.behind(told, int(context[texts]), place - texts, kinds.count(BLOCK)))


def drafting(engines: Any, *prompts: list[int], reach: int | None = None) -> tuple[Decoder, list[Any]]:
    """A decoder whose models have read the prompts, and its rows."""
    made = Decoder(*engines, costs=FixedCosts())
    model = Settings(draft="model", max_new_tokens=99)
    rows = [made._admission.row(i, list(prompt), model, Sample(), (), None) for i, prompt in enumerate(prompts)]
    made._target.reset(len(rows))
    made._prefill(rows)
    made._model.reset(rows, *([] if reach is None else [reach]))
    made._model.prefill(rows)
    return made, rows


def said(made: Decoder, rows: list[Any], lengths: list[int]) -> list[list[int]]:
    return [draft.tokens for draft in made._model.propose(rows, lengths)]


def commit(made: Decoder, rows: list[Any], drafts: Any, accepted: list[int], more: list[int]) -> None:
    """A round that kept so many of each row's draft, and got ``more``."""
    pieces = [[row.sequence.tokens[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
    made._target.all_logits(pieces, [row.sequence.cached for row in rows])
    for place, (row, draft, kept, token) in enumerate(zip(rows, drafts, accepted, more, strict=True)):
        row.sequence.tokens += [*draft[:kept], token]
        if draft:
            made._model.observe(place, kept)


def continued(engines: Any, prompt: list[int]) -> Iterator[tuple[FeatureToy, list[int], list[tuple[int, int]]]]:
    """A text continued where an answer of each of some lengths ended, which is to be what it would have been: the
    head, the text and the steps that the head took for it."""
    written = collect(Decoder(*engines()).decode([(prompt, Settings(max_new_tokens=50, draft="none"))]), 1)[0][0]
    for count in range(22, 30):
        made = Decoder(*engines(), costs=FixedCosts())
        first, then = (Settings(max_new_tokens=n, draft="model", draft_length=4) for n in (count, 20))
        (found,), _ = collect(made.decode([(prompt, first)]), 1)
        assert made._model is not None
        head: Any = made._model._stepper.engine
        head.calls.clear()
        text = prompt + found
        (more,), _ = collect(made.decode([(text, then)]), 1)
        assert found + more == written[: count + 20]
        yield head, text, head.calls


def texts_are_the_target_s(engines: Any, prompt: list[int], contexts: Iterable[tuple[int, Any]], filled: float) -> None:
    """Whatever the head's context and the draft length; rounds draft the share ``filled`` of what was asked for."""
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        for context, length in contexts:
            for prompts in ([prompt], [[4]], [prompt[:4], prompt, prompt[5:16]], [prompt, [1], prompt]):
                alone = Settings(max_new_tokens=60, draft="none", **how)  # type: ignore[arg-type]
                drafted = dataclasses.replace(alone, draft="model", draft_length=length)
                made = Decoder(*engines(context=context), costs=FixedCosts())
                texts, last = collect(made.decode([(p, drafted) for p in prompts]), len(prompts))
                plain = Decoder(engines()[0], None)
                assert texts == collect(plain.decode([(p, alone) for p in prompts]), len(prompts))[0]
                drafts = [stats.drafted / stats.rounds for stats in (each.stats for each in last.values())]
                assert length == "auto" or min(drafts) > filled * min(length, context + 1 - context // 2), "to the end"


def reads_again_what_it_wrote(engines: Any, prompt: list[int]) -> None:
    """How many tokens of a text the head lacks: those it drafted, which it read beside its own guesses, are of them."""
    made, (row,) = drafting(engines, prompt)
    model: Any = made._model
    assert model.behind([row]) == 0
    (draft,) = said(made, [row], [5])
    commit(made, [row], [draft], [4], [2])
    assert model.behind([row]) == 4, "the four it drafted"
    commit(made, [row], [[]], [0], [3])
    commit(made, [row], [[]], [0], [1])
    assert model.behind([row]) == 6, "and these, which it was not asked for"
    said(made, [row], [2])
    assert model.late == 6


def proposals(drafter: type, monkeypatch: Any) -> list[tuple[list[int], list[int]]]:
    """The texts and drafts of all rows, as a kind of drafter proposes them from now on."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose  # type: ignore[attr-defined]

    def watched(self: Any, rows: Any, lengths: Any, watch: Any = None) -> Any:
        drafts = propose(self, rows, lengths, watch)
        seen.extend((list(row.sequence.tokens), draft.tokens) for row, draft in zip(rows, drafts, strict=True))
        return drafts

    monkeypatch.setattr(drafter, "propose", watched)
    return seen
