"""The tests are tested: each of these classic bugs, put into the production source, must be found."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest
import test_laws
from support_runtime import collect, decode_law, distance, sharpened, target_law, toy_pair

from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import LeadoutError
from leadout.runtime import decoder, judging, sequence, steps
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter
from leadout.runtime.rules import buffers, law, noise, sampling, verify
from leadout.runtime.settings import Settings

PROMPT = [1, 2, 1, 2, 1]


def laws_hold(monkeypatch, **options):
    """The joint law of three tokens of whole runs is the target's."""
    target = table_law(3, seed=4)
    pair = target, mixed_law(target, table_law(3, seed=5), 0.8)
    found = decode_law(pair, 3, 3, monkeypatch, PROMPT, temperature=0.5, draft_length=2, **options)
    assert distance(found, target_law(sharpened(target, PROMPT, power=2.0), 3, 3)) < 1e-12


def rejection_holds(monkeypatch):
    laws_hold(monkeypatch, rule="rejection")


def fixed_drafts_hold(monkeypatch):
    laws_hold(monkeypatch, rule="rejection", draft="ngram")


def block_holds(monkeypatch):
    laws_hold(monkeypatch, rule="block")


def few_hold(monkeypatch):
    """Where settings leave few tokens, too: the law is what they leave of the target's row."""
    target, prompt = table_law(4, seed=4), [1, 2, 1, 2, 1]
    pair = target, mixed_law(target, table_law(4, seed=5), 0.5)

    def left(tokens, top_k):
        row = target(np.array([*prompt, *tokens]))
        kept = row >= np.sort(row)[-top_k]
        share = np.cumsum(np.sort(row[kept])[::-1]) / row[kept].sum()
        kept &= row >= np.sort(row)[::-1][int((share < 0.9).sum())]
        return np.where(kept, row, 0.0) / row[kept].sum()

    for rule, draft, top_k in (("block", "model", 3), ("rejection", "ngram", 3), ("block", "model", 0)):
        options = {"temperature": 1.0, "top_k": top_k, "top_p": 0.9, "draft_length": 2, "rule": rule, "draft": draft}
        found = decode_law(pair, 4, 3, monkeypatch, prompt, **options)
        assert distance(found, target_law(lambda tokens, k=top_k or 4: left(tokens, k), 4, 3)) < 1e-12


def texts(requests, eos=(), **change):
    decoder_ = Decoder(*toy_pair(11))
    batch = [(prompt, Settings(**(options | change))) for prompt, options in requests]
    found, last = collect(decoder_.decode(batch, eos_token_ids=eos), len(batch))
    return found, [last[i].finish_reason for i in range(len(batch))]


REQUESTS = [
    ([1, 2, 3], {"max_new_tokens": 25, "draft_length": 3}),
    ([4] * 30, {"max_new_tokens": 33, "draft_length": 1}),
    ([5, 6], {"max_new_tokens": 11, "draft_length": 6, "repetition_penalty": 1.5, "frequency_penalty": 0.4}),
    ([3, 1, 3], {"max_new_tokens": 30, "draft_length": 4, "min_new_tokens": 14}),
    ([3, 1, 3], {"max_new_tokens": 30, "draft_length": 4, "min_new_tokens": 14, "frequency_penalty": 0.1}),
    ([7, 8, 9, 1], {"max_new_tokens": 30, "draft_length": 5, "temperature": 1.0, "seed": 3, "min_new_tokens": 9}),
]


def drafts_change_nothing(monkeypatch):
    """Speculative equals plain, ragged batch equals each alone, every text ends where it must."""
    plain = [texts([request], eos=(0, 3, 7, 9), draft="none") for request in REQUESTS]
    together = texts(REQUESTS, eos=(0, 3, 7, 9))
    assert together == ([text for (text,), _ in plain], [reason for _, (reason,) in plain])
    for text, (_, options) in zip(together[0], REQUESTS, strict=True):
        assert not {0, 3, 7, 9} & set(text[:-1]) and len(text) <= options["max_new_tokens"]
        assert not {0, 3, 7, 9} & set(text[: options.get("min_new_tokens", 0)])


def acceptance_is_counted_right(monkeypatch):
    """A draft that is its own target is accepted always; its cache must be as right after full rounds as ever."""
    target, _ = toy_pair(11)
    twin, _ = toy_pair(11)
    settings = Settings(max_new_tokens=40, draft_length=4)
    _, last = collect(Decoder(target, twin).decode([([1, 2], settings)]), 1)
    assert last[0].stats.acceptance_rate == 1.0 and last[0].stats.rounds == 8


def drafts_are_the_draft_model_s_own(monkeypatch):
    """Every draft of a ragged batch is what the draft model says after the committed text, whatever came before."""
    target, draft = toy_pair(11)
    seen = []
    forward = target.forward

    def spy(tokens, past_lens, logit_index=None):
        if logit_index is None or logit_index.shape[1] > 1:
            seen.extend(
                (row, past, target._cache[row, :past].copy(), piece) for row, (past, piece) in spied(tokens, past_lens)
            )
        return forward(tokens, past_lens, logit_index)

    def spied(tokens, past_lens):
        return enumerate(zip(past_lens.tolist(), tokens.tolist(), strict=True))

    target.forward = spy
    lengths = (5, 2, 3)
    batch = [([1, 2, 3, 4][: 2 + i], Settings(max_new_tokens=30, draft_length=n)) for i, n in enumerate(lengths)]
    collect(Decoder(target, draft).decode(batch), 3)
    checked = 0
    for row, past, before, piece in seen:
        if past > 24:  # rows leave or shorten their drafts near the end
            continue
        context = [*before.tolist(), piece[0]]
        for token in piece[1 : lengths[row] + 1]:
            assert token == int(draft.law(np.array(context)).argmax())
            context.append(token)
            checked += 1
    assert checked > 60


def noise_is_a_function_of_its_key(monkeypatch):
    one = noise.Noise(1)
    first = one.uniforms(5, noise.Purpose.DRAFT, 4)
    one.uniforms(9, noise.Purpose.DRAFT, 3)
    assert one.uniforms(5, noise.Purpose.DRAFT, 4) == first
    assert not {*noise.Noise(2).uniforms(5, noise.Purpose.DRAFT, 4)} & {*first}
    gumbels = noise.Noise(1).gumbel(5, 6)
    one.gumbel(9, 3)
    assert (one.gumbel(5, 6) == gumbels).all()


def noise_is_philox(monkeypatch):
    """The same numbers as numpy's generator, through either way."""
    for seed, stream in ((0, 0), (7, 2), (2**64 - 1, 2**64 - 1)):
        state = np.random.Philox(key=seed | stream << 64, counter=[0, 11, int(noise.Purpose.GUMBEL), 0])
        expected = np.random.Generator(state).random(37).tolist()
        ours = noise.Noise(seed, stream)
        assert ours.uniforms(11, noise.Purpose.GUMBEL, 37) == expected == ours.raw(11, 37)[0].tolist()
        for purpose in noise.Purpose:  # whichever of them was asked for first
            state = np.random.Philox(key=seed | stream << 64, counter=[0, 11, int(purpose), 0])
            expected = np.random.Generator(state).random(9).tolist()
            assert [ours.uniforms(11, purpose, size) for size in (1, 9, 3)] == [expected[:1], expected, expected[:3]]


def memory_has_one_owner(monkeypatch):
    """An array keeps its memory for as long as a view of it lives."""
    size = 20_011  # of nobody else: the mutant leaves memory that is in the stock twice
    del monkeypatch
    first = [buffers.empty(size, np.float32) for _ in range(3)]
    view = first.pop()[5:9]
    view[:] = 7.0
    first.clear()
    again = [buffers.empty(size, np.float32) for _ in range(4)]
    for number, array in enumerate(again):
        array[:] = number
    assert (view == 7.0).all() and [array[0] for array in again] == [0, 1, 2, 3]


def a_sequence_cuts(monkeypatch):
    text = sequence.Sequence([9, 9], 2, limit=3, max_context=4, ends=frozenset())
    assert text.extend([1, 2, 3]) == (2, "context") and text.tokens == [9, 9, 1, 2]
    text = sequence.Sequence([9], 1, limit=3, max_context=9, ends=frozenset(), stop=lambda new: None)
    assert text.extend([1]) == (1, None) and text.extend([2, 3, 4]) == (2, "length")


def coupled_accepts(monkeypatch):
    """Draft and target share their noise: a twin draft is always accepted."""
    target, _ = toy_pair(11)
    twin, _ = toy_pair(11)
    settings = Settings(max_new_tokens=40, draft_length=4, temperature=1.0, seed=1)
    _, last = collect(Decoder(target, twin).decode([([1, 2], settings)]), 1)
    assert last[0].stats.acceptance_rate == 1.0


def an_end_comes_as_soon_as_it_may(monkeypatch):
    """Where the end token is always the likeliest, a text has min_new_tokens others and then ends."""
    law = np.array([0.2, 0.5, 0.3])
    for minimum, length in itertools.product(range(6), (0, 2, 4)):
        pair = ToyEngine(lambda context: law, 3), ToyEngine(lambda context: law, 3)
        settings = Settings(min_new_tokens=minimum, draft_length=length)
        (text,), last = collect(Decoder(*pair).decode([([0], settings)], eos_token_ids=[1]), 1)
        assert text == [2] * minimum + [1] and last[0].finish_reason == "stop"


def outcomes_are_expected_ones(monkeypatch):
    for rule in ("rejection", "block"):
        test_laws.test_expected_outcomes_have_the_mean_of_what_happens_and_less_noise(rule)


CHECKS = [
    an_end_comes_as_soon_as_it_may,
    noise_is_a_function_of_its_key,
    noise_is_philox,
    memory_has_one_owner,
    a_sequence_cuts,
    acceptance_is_counted_right,
    coupled_accepts,
    drafts_are_the_draft_model_s_own,
    drafts_change_nothing,
    fixed_drafts_hold,
    rejection_holds,
    block_holds,
    few_hold,
    outcomes_are_expected_ones,
]


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in the source of ``owner.name``; at least one check must fail."""

    bug: str
    owner: object
    name: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "p and q swapped",
        verify,
        "rejection",
        "uniforms[i] * given < chance",
        "uniforms[i] * chance < given",
    ),
    Mutant(
        "accept when p is at least half of q",
        verify,
        "rejection",
        "uniforms[i] * given < chance",
        "given <= 2 * chance",
    ),
    Mutant(
        "threshold instead of a coin",
        verify,
        "rejection",
        "uniforms[i] * given < chance",
        "given <= chance",
    ),
    Mutant(
        "resample from the target",
        verify,
        "rejection",
        "draw(rest)",
        "draw(row)",
    ),
    Mutant(
        "abs() residual", verify, "excess", "np.maximum(scaled, q, out=rest)", "np.add(abs(scaled - q), q, out=rest)"
    ),
    Mutant("residual of the wrong way round", verify, "excess", "rest -= q", "rest -= scaled"),
    Mutant(
        "residual from the next row",
        verify,
        "rejection",
        "residual(row, q[i])",
        "residual(p(i + 1), q[i])",
    ),
    Mutant("bonus from the last draft's row", verify, "rejection", "draw(p(len(x)))", "draw(p(max(len(x) - 1, 0)))"),
    Mutant(
        "bonus from a residual",
        verify,
        "rejection",
        "draw(p(len(x)))",
        "draw(residual(p(len(x)), q[-1]) if q else p(len(x)))",
    ),
    Mutant("one-hot residual keeps the rejected token", verify, "without", "rest[token] = 0.0", "rest[token] *= 1.0"),
    Mutant("residual of few is not weighted", verify, "excess", "weight * mass - given", "mass - given"),
    Mutant("residual of few the wrong way round", verify, "excess", "weight * mass - given", "given - weight * mass"),
    Mutant("residual of few without q", verify, "excess", "mass - given", "mass"),
    Mutant("one-hot residual of few keeps the rejected token", verify, "without", "if other != token", "if True"),
    Mutant("few of a round are not few", sampling.Chain, "masses", "weights[kept]", "weights[kept] * 0.5 + 0.1"),
    Mutant("few are not normalised", law.Few, "__truediv__", "each / mass", "each"),
    Mutant("block: weights not clipped", verify, "block", "min(1.0, weights[i] *", "(weights[i] *"),
    Mutant("block: residual not weighted", verify, "block", "q[accepted], weights[accepted])", "q[accepted])"),
    Mutant(
        "block: residual of the last weight",
        verify,
        "block",
        "q[accepted], weights[accepted])",
        "q[accepted], weights[-1])",
    ),
    Mutant("block: threshold not weighted", verify, "block_threshold", "excess(p, q, weight)", "excess(p, q)"),
    Mutant(
        "block: threshold of the last", verify, "block", "if i < len(x) else weights[i])", "if i < len(x) else 1.0)"
    ),
    Mutant(
        "block: the shortest prefix whose coin lands",
        verify,
        "block",
        "range(len(weights) - 1, 0, -1)",
        "range(1, len(weights))",
    ),
    Mutant("block: what was hardly reached counts in full", verify, "block", "(weights[i], weight)", "(1.0, weight)"),
    Mutant("block: the prefix before it is kept", verify, "block", "(weights[i], weight)", "(weights[i], weights[i])"),
    Mutant("the coin's side is half expected", verify, "rejection", "else chance / given", "else chance"),
    Mutant(
        "q not as sampled",
        sampling.Sampler,
        "propose",
        "token, over(masses, mass)",
        "token, over(masses**2, (masses**2).sum())",
    ),
    Mutant("q not normalised", sampling.Sampler, "propose", "over(masses, mass)", "over(masses, 2 * mass)"),
    Mutant(
        "q of the logits without the chain",
        model_drafter.ModelDrafter,
        "_choose",
        "draft.q = [*(draft.q or []), q]",
        "draft.q = [*(draft.q or []), 2.0 ** logits.astype(float) / (2.0 ** logits.astype(float)).sum()]",
    ),
    Mutant(
        "an unlikely last draft is dropped",
        decoder.Decoder,
        "_forward",
        "pieces = [",
        "[(d.tokens.pop(), d.q.pop()) for d in drafts if d.q and d.q[-1][d.tokens[-1]] < 0.3]\n    pieces = [",
    ),
    Mutant("coins used again for the final draw", judging, "judge", "Purpose.FINAL", "Purpose.ACCEPT"),
    Mutant("draft's noise used again for the coins", judging, "judge", "Purpose.ACCEPT", "Purpose.DRAFT"),
    Mutant(
        "noise keyed by token position, not by round (block looks ahead)",
        judging,
        "judge",
        "sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))",
        "[sampler.noise.uniforms(start + i, Purpose.ACCEPT, 1)[0] for i in range(len(x))]",
    ),
    Mutant(
        "match: one too many kept",
        verify,
        "match",
        "return Verdict(i, chosen, i + 1)",
        "return Verdict(i + 1, chosen, i + 1)",
    ),
    Mutant("match: drafts compared with the next row", verify, "match", "choose(i)", "choose(i + 1)"),
    Mutant(
        "the target's cache is not rolled back",
        sequence.Sequence,
        "cached",
        "len(self.tokens) - 1",
        "len(self.tokens)",
    ),
    Mutant(
        "the draft's cache is not rolled back",
        model_drafter.ModelDrafter,
        "observe",
        "min(self._valid[place], self._base[place] + accepted)",
        "self._valid[place]",
    ),
    Mutant(
        "the draft's cache counts a token that was never fed",
        model_drafter.ModelDrafter,
        "observe",
        "min(self._valid[place], self._base[place] + accepted)",
        "self._base[place] + accepted",
    ),
    Mutant("penalties do not see the draft", sampling.Chain, "_penalised", "_seen.behind(drafted)", "_seen.behind(())"),
    Mutant(
        "min_new_tokens does not count the draft",
        sampling.Chain,
        "_penalised",
        "self.generated + len(drafted) <",
        "self.generated <",
    ),
    Mutant(
        "min_new_tokens off by one",
        sampling.Chain,
        "_penalised",
        "len(drafted) < settings.min_new_tokens",
        "len(drafted) < settings.min_new_tokens - 1",
    ),
    Mutant(
        "a padding position is read",
        steps.Stepper,
        "_ending",
        "list(map(len, pieces))",
        "[longest] * len(pieces)",
    ),
    Mutant("end tokens inside a round are ignored", sequence.Sequence, "extend", "kept[: end + 1], ", "kept, "),
    Mutant("max_new_tokens is not cut", sequence.Sequence, "extend", "new[: self.room]", "new"),
    Mutant(
        "Gumbel noise by step, not by position",
        sampling.Sampler,
        "propose",
        "start + len(drafted)",
        "start",
    ),
    Mutant(
        "Gumbel noise by round, not by position",
        judging,
        "judge",
        "x[:i], start + i",
        "x[:i], start",
    ),
    Mutant("a finished row's place is not refilled", decoder.Decoder, "_retire", "live[place] = last", "pass"),
    Mutant(
        "a moved row leaves its cache behind",
        decoder.Decoder,
        "_retire",
        "self._target.copy_row(len(live), place)",
        "pass",
    ),
    Mutant(
        "min_new_tokens off by one where nothing else changes logits",
        sampling.Chain,
        "_adds",
        "< self.settings.min_new_tokens",
        "< self.settings.min_new_tokens - 1",
    ),
    Mutant(
        "noise depends on what was asked before",
        noise.Noise,
        "_many",
        "self._philox.state = self._state",
        "pass",
    ),
    Mutant("a round of the generator is lost", noise.Noise, "_block", "in self._keys", "in self._keys[:9]"),
    Mutant("coins come again after four", noise.Noise, "uniforms", "self._four(place,", "self._four(1,"),
    Mutant("a round's coins are one", noise.Noise, "_toss", "position, each) for", "position, purpose) for"),
    Mutant("memory is lent twice", buffers, "empty", "_stock[length].pop()", "_stock[length][-1]"),
    Mutant("laws not normalised", sampling.Chain, "distributions", "probs /= np", "probs *= np"),
    Mutant("laws without the temperature", sampling.Chain, "distributions", "scores /= self", "0 / self"),
    Mutant("laws of rows on end", sampling.Chain, "distributions", "list(probs)", "list(probs[::-1])"),
    Mutant("laws that see no history", sampling.Chain, "distributions", "not self.is_plain(())", "False"),
    Mutant("the last row is another's", judging, "judge", "logits[i], x[:i]", "logits[max(i - 1, 0)], x[:i]"),
]


def mutate(monkeypatch, mutant):
    original = vars(mutant.owner)[mutant.name]
    function = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) >= 1, f"the production source has changed: {mutant.old!r} is not in it"
    if isinstance(mutant.owner, type):  # outside of its class a function has none
        source = source.replace("super()", f"super({mutant.owner.__name__}, self)")
    changed = compile("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), "mutant", "exec")
    scope: dict = {}
    exec(changed, inspect.getmodule(function).__dict__, scope)
    monkeypatch.setattr(mutant.owner, mutant.name, scope[mutant.name])


def must_die(mutant, checks, monkeypatch):
    mutate(monkeypatch, mutant)
    for check in checks:
        try:
            check(monkeypatch)
        except (AssertionError, LeadoutError, LookupError):
            return
    pytest.fail(f"nothing noticed: {mutant.bug}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
