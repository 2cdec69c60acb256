"""The lossy rules: what they emit, exactly, and that the distance they report is the distance there is."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import click
import numpy as np
import pytest
from support_runtime import Branches, Coin, collect, decode_law, distance, law, sharpened, target_law, toy_pair
from test_laws import rows_by_context

from leadout.engines.toy import mixed_law, table_law
from leadout.errors import EngineError, UsageError
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules import lossy, verify
from leadout.runtime.rules.sampling import Chain
from leadout.runtime.settings import Settings
from leadout.runtime.stats import Stats
from leadout.scripts.cmd_generate import command, summarise

TIGHT = 1e-12
MASSES = {
    "typical": lossy.typical(0.05, 0.2),
    "lenient": lossy.lenient(0.4),
    "exact": lossy.lenient(1.0),
}


def one_round(mass, p, q, vocab, length):
    """The law of (verdict's tokens, its distances) of one round of sampled (or the fixed) drafts."""

    def run(branches: Branches):
        fixed = isinstance(q, tuple)
        x: list[int] = []
        for i in range(length):
            x.append(q[i] if fixed else Coin(branches).draw(q[tuple(x)]))
        rows = None if fixed else [q[tuple(x[:i])] for i in range(length)]
        coins = [Coin(branches) for _ in x]
        verdict = lossy.relaxed(
            x, rows, lambda i: p[tuple(x[:i])], mass, coins, lambda weights: Coin(branches).draw(weights)
        )
        assert len(verdict.distances) == verdict.accepted + 1
        return (*x[: verdict.accepted], verdict.token), verdict.distances

    return law(run)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", MASSES)
@pytest.mark.parametrize("fixed", [None, (1, 0)])
def test_the_reported_distance_is_that_of_the_law_emitted(name, zeros, fixed):
    """At every position of a round, given the text before it: total variation from p, enumerated."""
    p, q = (rows_by_context(np.random.default_rng([seed, zeros]), 4, 3, zeros=zeros) for seed in (1, 2))
    joint = one_round(MASSES[name], p, fixed or q, 4, 2)
    assert sum(joint.values()) == pytest.approx(1.0, abs=TIGHT)
    seen = 0
    for place, before in [(0, ()), *((1, (token,)) for token in range(4))]:
        emitted, reported, total = np.zeros(4), set[float](), 0.0
        for (tokens, distances), chance in joint.items():
            if len(tokens) > place and tokens[:place] == before:
                emitted[tokens[place]] += chance
                total += chance
                reported.add(distances[place])
        if total:
            exact = 0.5 * float(np.abs(emitted / total - p[before]).sum())
            assert max(abs(distance - exact) for distance in reported) < 1e-11
            seen += 1
    assert seen >= 2
    assert (max(max(distances) for _, distances in joint) > 0.01) == (name != "exact")


@pytest.mark.parametrize("leniency", [0.2, 0.7, 1.0])
def test_no_token_becomes_likelier_than_leniency_allows(leniency):
    """The bound of appendix A.5, and its acceptance: the sum of min(p / l, q)."""
    p, q = (rows_by_context(np.random.default_rng(seed), 5, 2) for seed in (3, 4))
    emitted, kept = np.zeros(5), 0.0
    for (tokens, _), chance in one_round(lossy.lenient(leniency), p, q, 5, 1).items():
        emitted[tokens[0]] += chance
        kept += chance * (len(tokens) == 2)
    assert (emitted <= p[()] / leniency + TIGHT).all()
    assert kept == pytest.approx(float(np.minimum(p[()] / leniency, q[()]).sum()), abs=TIGHT)


def test_leniency_1_is_rejection():
    rng = np.random.default_rng(8)
    p, q = rows_by_context(rng, 3, 3), rows_by_context(rng, 3, 3)
    for x in itertools.product(range(3), repeat=2):
        rows, coins = [q[()], q[x[:1]]], [0.5, 0.9]
        drawn = [lambda weights: int(weights.argmax())] * 2
        wanted = verify.rejection(x, rows, lambda i, x=x: p[x[:i]], coins, drawn[0])
        found = lossy.relaxed(x, rows, lambda i, x=x: p[x[:i]], lossy.lenient(1.0), coins, drawn[1])
        assert (found.accepted, found.token, found.tested) == (wanted.accepted, wanted.token, wanted.tested)


def test_typical_keeps_what_is_likely_enough():
    """Cai et al.: p > min(epsilon, delta exp(-H)); two equal tokens have entropy log 2."""
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.0, 0.8])
    assert lossy.typical(0.9, 0.9)(p, q).tolist() == [0.2, 0.0, 0.0]
    assert lossy.typical(0.9, 1.0)(p, q).tolist() == [0.0, 0.0, 0.0], "the threshold is 0.5 and must be exceeded"
    assert lossy.typical(0.4, 1.0)(p, q).tolist() == [0.2, 0.0, 0.0]


def test_lenient_greedy_keeps_near_bests_and_counts_them():
    rows = [np.array([1.0, 0.6, 0.1]), np.array([0.3, 1.0, 0.5]), np.array([0.2, 0.1, 1.0])]

    def verdict(x, leniency):
        return lossy.lenient_greedy(x, rows.__getitem__, lambda i: int(rows[i].argmax()), leniency)

    assert verdict([1, 2], 0.5) == verify.Verdict(2, 2, 2, (1.0, 1.0, 0.0))
    assert verdict([0, 2], 0.6) == verify.Verdict(1, 1, 2, (0.0, 0.0))
    assert verdict([1, 1], 1.0) == verify.Verdict(0, 0, 1, (0.0,))
    assert verdict([0, 1], 1.0) == verify.Verdict(2, 2, 2, (0.0, 0.0, 0.0))


def whole_run(monkeypatch, **options):
    """(distance of the law of one token after a whole run's first round, what the events reported on average)."""
    target, other = table_law(3, seed=4), table_law(3, seed=5)
    prompt, reports = [1, 2, 1, 2, 1], []
    laws = target, mixed_law(target, other, 0.8)

    def watch(event):
        if event.stats is not None:
            reports.append(event.stats.distance)

    found = decode_law(laws, 3, 1, monkeypatch, prompt, watch, temperature=0.5, draft_length=1, **options)
    return distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 1)), set(reports)


@pytest.mark.parametrize(
    "options", [{"rule": "typical", "typical_epsilon": 0.01}, {"rule": "lenient", "leniency": 0.3}]
)
@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_whole_runs_report_the_distance_of_their_law(options, draft, monkeypatch):
    """The first of two tokens is drafted, the last is the target's own: no room for a draft."""
    found, reports = whole_run(monkeypatch, draft=draft, **options)
    assert found < TIGHT and reports == {0.0}
    target, prompt = table_law(3, seed=4), [1, 2, 1, 2, 1]
    laws, reports = (target, mixed_law(target, table_law(3, seed=5), 0.8)), []
    joint = decode_law(
        laws, 3, 2, monkeypatch, prompt, reports.append, temperature=0.5, draft_length=1, draft=draft, **options
    )
    first = np.array([sum(chance for tokens, chance in joint.items() if tokens[0] == token) for token in range(3)])
    truth = sharpened(target, prompt, power=2.0)(())
    exact = 0.5 * float(np.abs(first - truth).sum())
    shifts = [event.stats.shift for event in reports if event.stats is not None]
    assert shifts == pytest.approx([exact] * len(shifts), abs=1e-9)
    assert (exact > 0.01) == (draft != "none")


def decode(**options):
    target, draft = toy_pair(11)
    (text,), last = collect(Decoder(target, draft).decode([([1, 2, 3], Settings(max_new_tokens=40, **options))]), 1)
    return target, text, last[0]


def test_lenient_greedy_runs_count_the_tokens_that_are_not_the_target_s():
    target, text, last = decode(rule="lenient", leniency=0.2, draft_length=4)
    context, foreign = [1, 2, 3], 0
    for token in text:
        foreign += token != int(target.law(np.array(context)).argmax())
        context.append(token)
    assert last.rule == "lenient" and last.stats.shift == foreign > 0
    _, plain, exact = decode(draft="none")
    assert decode(rule="lenient", leniency=1.0, draft_length=4)[1] == plain and exact.stats.distance == 0
    assert last.stats.tokens_per_round > decode(draft_length=4)[2].stats.tokens_per_round


def test_weights_are_p_over_its_largest():
    p = np.array([0.4, 0.05, 0.3, 0.25])
    chain = Chain(Settings(rule="lenient", logit_bias={1: -math.inf}), 4, [0], ())
    found = chain.weights(np.log(p).astype(np.float32))
    assert np.abs(found - [1.0, 0.0, 0.75, 0.625]).max() < 1e-6
    with pytest.raises(EngineError, match="no finite maximum"):
        chain.weights(np.full(4, -np.inf, np.float32))


def test_typical_is_greedy_at_temperature_0():
    _, text, last = decode(rule="typical", draft_length=4)
    assert last.rule == "greedy" and text == decode(draft="none")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leniency": 0.5}, "leniency belongs to rule 'lenient', not to 'auto'"),
        ({"rule": "typical", "leniency": 0.5}, "leniency belongs to rule 'lenient', not to 'typical'"),
        ({"rule": "lenient", "typical_delta": 0.5}, "typical_delta belongs to rule 'typical', not to 'lenient'"),
        ({"rule": "lenient", "leniency": 0}, "leniency must be above 0 and at most 1, not 0"),
        ({"rule": "lenient", "leniency": 1.5}, "leniency must be above 0 and at most 1, not 1.5"),
        (
            {"rule": "typical", "typical_epsilon": float("nan")},
            "typical_epsilon must be above 0 and at most 1, not nan",
        ),
    ],
)
def test_settings_of_lossy_rules_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        Settings(**options)


def test_auto_never_is_lossy():
    for temperature, seed, draft in itertools.product((0.0, 1.0), (None, 3), ("auto", "model", "ngram", "none")):
        rule = Settings(temperature=temperature, seed=seed, draft=draft).acceptance_rule
        assert rule not in ("typical", "lenient")


@pytest.mark.parametrize("lossless", [True, False])
def test_a_summary_says_lossy_where_the_answer_is(capsys, lossless):
    """Without a draft nothing is accepted that the rule could give up anything for."""
    result = SimpleNamespace(stats=Stats(), draft="none", rule="lenient", seed=None, finish_reason="length")
    result.lossless, result.distance = lossless, 0.25
    summarise(result)
    assert ("LOSSY: 0.2500" in capsys.readouterr().err) is not lossless


@pytest.mark.parametrize(
    ("name", "rule"), [("typical_epsilon", "typical"), ("typical_delta", "typical"), ("leniency", "lenient")]
)
def test_the_command_line_says_the_range_that_settings_have(name, rule):
    told = {option.name: option.help for option in command.params if isinstance(option, click.Option)}
    assert "above 0, at most 1" in told[name]
    assert Settings(rule=rule, **{name: 1}) and Settings(rule=rule, **{name: 1e-9})
    with pytest.raises(UsageError, match=f"{name} must be above 0 and at most 1"):
        Settings(rule=rule, **{name: 0})
