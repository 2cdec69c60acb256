"""What is measured before anything is known, and what it is allowed to cost."""

from __future__ import annotations

import math

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_cascade import cascade, choose
from test_mutants import Mutant, must_die
from test_policy import next_round

from leadout.runtime.controller import costs, coverage, policy, prices, typical
from leadout.runtime.controller.cascade import Cascade
from leadout.runtime.controller.costs import Cost, Costs, Step
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import Settings


def measured(*, per_draft, kept, rows=1):
    """The lengths that a first text asks for of a draft of which the target keeps the first ``kept`` tokens."""
    table, lengths = Costs(), []
    pace = Pace(table)
    requests = [AutoLength(pace) for _ in range(rows)]
    for _ in range(14):
        this, length = next_round(pace, *requests)
        if this.explores:
            lengths.append(length)
            table.record_target(rows, length + 1, 1.0 + 0.02 * length)
            table.record_draft(rows, length, per_draft * length)
            for request in requests:
                request.observe(happened(tested=min(kept + 1, length), accepted=min(kept, length)))
    return lengths


def only_what_may_be_the_best_is_measured():
    assert measured(per_draft=1.5, kept=0) == [4, 4, 0, 0], "two lengths say that nothing can pay"
    assert measured(per_draft=0.01, kept=16) == [4, 4, 0, 0, 8, 8], "and that only long drafts can be the best"
    assert 8 not in measured(per_draft=0.3, kept=1)


def a_batch_asks_for_less():
    assert measured(per_draft=1.5, kept=0, rows=16) == [3, 3, 0, 0]
    assert measured(per_draft=0.01, kept=16, rows=16) == [3, 3, 0, 0], "the longest is known"


def all_is_measured_where_nobody_says_what_is_best():
    table, lengths = Costs(), []
    while (length := table.coverage.first_length(3)) is not None:
        lengths.append(length)
        table.record_target(1, length + 1, 1.0)
    assert lengths == [0, 0, 2, 2, 1, 1, 3, 3]


def what_is_only_measured_waits_while_a_guess_promises_more():
    """A draft of four is to be measured, and expected to bring 1 + 0.7 + ... + 0.7**4 = 2.8 tokens."""
    for rate, by in ((0.9, "fixed"), (0.4, "model")):
        chooser, _ = cascade(range(16), costs=Costs(), model=True, rate=rate)
        assert choose(chooser, 16, 16).by == by
        assert chooser._choice.this.why == "measured" and chooser._choice.this.length == 4


def what_is_fixed_or_shared_does_not_wait():
    fixed, _ = cascade(range(16), costs=Costs(), model=True, rate=0.9, length=4)
    assert fixed._waits(Round(length=4, why="measured"), 4, 9.0) is False
    chooser, model = cascade(range(16), costs=Costs(), model=True, rate=0.9)
    this = chooser._pace.tick(2)
    allotted = chooser._pace.lengths(this, [model, model], [16, 16])[0]
    assert this.why == "measured" and chooser.choose(this, [1], 16, 16, allotted).by == "model"


def what_promises_more_a_second_does_not_wait():
    """The guess promises more tokens, the draft model more of them a second."""
    chooser, model = cascade(range(16), costs=FixedCosts(per_draft=0.01, per_token=0.5), model=True, rate=0.9)
    model.tokens = [1.0, 1.95, 2.85, 3.7]
    assert choose(chooser, 16, 16).by == "model" and chooser._choice.best.promised > 3.7


def free_drafters_alone_guess_as_far_as_it_pays():
    """Nothing but a plain step is measured for its own sake where there is no draft model."""
    sure, unsure = (choose(cascade(range(16), costs=Costs(), rate=rate)[0], 16, 0) for rate in (0.9, 0.02))
    assert len(sure.tokens) == 10 and not sure.whole, "argmax of (1 + 0.9 + ... + 0.9**n) / (1 + 0.1 n)"
    assert not unsure.tokens


def a_plain_step_is_measured_whoever_could_guess():
    chooser, _ = cascade(range(16), costs=Costs(), rate=0.9)
    chooser._pace.survey.unclear = True
    assert choose(chooser, 16, 0).by == "none" and not chooser.asks


def one_width_says_roughly_what_the_others_take():
    """Else a step of 64 would seem to take as long as one of five."""
    table = Costs()
    table.record_target(1, 5, 1.4)
    assert [table.target(1)[width] for width in (1, 5, 17)] == pytest.approx([1.0, 1.4, 2.6])
    table.record_target(1, 1, 1.3)
    assert table.target(1)[17] == pytest.approx(1.7), "what was measured counts as soon as there is a line"


def one_measurement_renews_what_a_plain_step_takes():
    """Half of what is known is what was: one step more or less unusual must not decide that no draft pays."""
    table = Costs()
    for _ in range(12):
        table.record_target(1, 1, 2.0, drafts=False, modelled=False)
    for _ in range(300):
        table.record_target(1, 5, 1.5)
    assert table.coverage.lacks_plain(1) and table.plain(1, 1) == 2.0
    while table.counts[Step("plain", 1, 0, 1)] < 5:
        table.record_target(1, 1, 1.0, drafts=False, modelled=False)
    assert table.plain(1, 1) == pytest.approx(math.sqrt(2.0))
    table.record_target(1, 1, 1.0, drafts=False, modelled=False)
    assert table.plain(1, 1) == 1.0, "little is left of what was long ago"


def one_measurement_is_enough_to_learn_that_a_width_is_fast_now():
    table = Costs()
    for _ in range(12):
        table.record_target(1, 5, 2.0)
    for _ in range(300):
        table.record_target(1, 1, 0.5)
    table.record_target(1, 5, 1.0)
    assert table.target(1)[5] == pytest.approx(1.0)


def tries(reading):
    """Rounds in which a draft is tried that does not pay, lacks ever more, and takes ``reading`` a prompt's token."""
    pace = Pace(FixedCosts(per_draft=5.0))
    request = AutoLength(pace)
    pace.read([request], 10, 10 * reading)
    found = []
    for number in range(400):
        found += [number] if pace.lengths(pace.tick(), [request], [16], lambda number=number: number)[0] else []
        if found:
            request.observe(happened(1, 0))
    return found


def what_was_missed_has_a_price_before_it_was_measured():
    assert tries(0.001) and not tries(1.0)


def test_a_few_tokens_do_not_say_what_a_prompt_s_take():
    pace, prices = Pace(FixedCosts()), []
    for tokens, seconds in ((0, 1.0), (3, 6.0), (20, 10.0), (3, 6.0), (0, 1.0)):
        pace.read([], tokens, seconds)
        prices.append(pace.prices.reading)
    assert prices == [0.0, 2.0, 0.5, 0.5, 0.5]


def equal_prompts_are_read_once():
    one = Decoder(*toy_pair(9))
    one._prefill_draft = lambda rows: 12.0
    prompts = [[1, 2, 3, 4, 5]] * 3 + [[1, 2, 3]]
    collect(one.decode([(prompt, Settings(max_new_tokens=2, draft="model")) for prompt in prompts]), len(prompts))
    assert one._pace.prices.reading == 2.0


def a_stall_in_one_step_does_not_make_the_widths_beside_it_dear():
    """The step of three tokens stood still for 57 ms, and is not taken again."""
    table = Costs()
    for width, seconds in ((5, 1.0), (5, 1.0), (1, 0.7), (1, 0.7), (4, 0.9), (8, 1.2), (3, 57.0)):
        table.record_target(1, width, seconds)
    assert table.target(1)[:9] == pytest.approx(
        [0.7, 0.7, 0.7 + 0.2 / 3, 0.7 + 0.4 / 3, 0.9, 1.0, 3.2 / 3, 3.4 / 3, 1.2]
    )
    for steps, seconds in ((8, 4.0), (2, 40.0), (4, 2.0)):
        table.record_draft(1, steps, seconds)
    assert table.drafts(1)[:5] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    for _ in range(2):
        table.record_target(1, 3, 57.0)
    assert table.target(1)[3] > 10, "what is seen again and again is believed"


def what_is_measured_tells_how_far_a_table_on_disk_is_off():
    steps = {(0, 1): 1.0, (0, 2): 1.2, (0, 5): 1.6, (1, 2): 1.3, (1, 5): 1.8}
    said = [Cost("target", 1, context, width, seconds) for (context, width), seconds in steps.items()]
    said += [Cost("draft", 1, 0, length, 0.5 * length) for length in (1, 2, 4)] + [Cost("plain", 1, 0, 1, 0.8)]
    table = Costs(said)
    assert (table.target(1)[5], table.drafts(1)[4], table.plain(1, 1)) == (1.6, 2.0, 0.8)
    table.record_target(1, 2, 2.4)
    assert [table.target(1)[width] for width in (1, 2, 5)] == pytest.approx([2.0, 2.4, 3.2])
    assert [table.target(1, 200)[width] for width in (2, 5)] == pytest.approx([2.6, 3.6]), "on other contexts, too"
    longer = [sum(table.target(1, past)[width] for width in (1, 2, 5)) for past in (0, 200)]
    assert (table.plain(1, 1), table.plain(1, 1, 200)) == pytest.approx((1.6, 1.6 * longer[1] / longer[0]))
    assert table.drafts(1)[4] == 2.0, "what drafts take is another question"
    table.record_draft(1, 1, 0.25)
    assert table.drafts(1)[1:5] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert {cost.seconds for cost in table.entries() if cost.part == "draft"} == {0.25, 0.5, 1.0}
    table.record_draft(1, 4, 3.0)
    assert [table.drafts(1)[length] for length in (1, 2, 4)] == pytest.approx([0.25, 1.3, 3.0]), "3.25 instead of 2.5"


CHECKS = [
    what_is_measured_tells_how_far_a_table_on_disk_is_off,
    a_stall_in_one_step_does_not_make_the_widths_beside_it_dear,
    only_what_may_be_the_best_is_measured,
    a_batch_asks_for_less,
    all_is_measured_where_nobody_says_what_is_best,
    what_is_only_measured_waits_while_a_guess_promises_more,
    what_is_fixed_or_shared_does_not_wait,
    what_promises_more_a_second_does_not_wait,
    free_drafters_alone_guess_as_far_as_it_pays,
    a_plain_step_is_measured_whoever_could_guess,
    one_width_says_roughly_what_the_others_take,
    one_measurement_renews_what_a_plain_step_takes,
    one_measurement_is_enough_to_learn_that_a_width_is_fast_now,
    what_was_missed_has_a_price_before_it_was_measured,
    equal_prompts_are_read_once,
]
C = coverage.Coverage
MUTANTS = [
    Mutant("all lengths are measured", C, "first_length", "best is not None and", "False and"),
    Mutant("one length says it all", C, "first_length", ">= _ROUGHLY", ">= 1"),
    Mutant("the nearest length is the first", C, "first_length", "abs(length - seems)", "length"),
    Mutant("what is known is measured again", C, "first_length", "[near] if near in lacking else []", "[near]"),
    Mutant("a measurement before a good guess", Cascade, "_waits", "return measures", "return False"),
    Mutant("a measurement waits for any guess", Cascade, "_waits", "promised > self", "promised > 0 * self"),
    Mutant("all that is drafted waits", Cascade, "_waits", 'this.why == "measured"', "True"),
    Mutant("a fixed length waits", Cascade, "_waits", "self._fixed is None", "True"),
    Mutant("rows of a batch wait for each other", Cascade, "_waits", "this.rows == 1", "True"),
    Mutant(
        "plain steps are measured some other time",
        Cascade,
        "_wanted",
        "self._pace.survey.wants_plain(limit, rows)",
        "False",
    ),
    Mutant("one width says that all take the same", costs.Costs, "target", "len(known) == 1", "False"),
    Mutant("what was long ago outvotes what is", typical.Typical, "fade", "[self.seconds]", "[self.seconds] * 4"),
    Mutant("one bad moment ends all drafting", costs.Costs, "record_target", "even=plain", "even=False"),
    Mutant("one bad moment is half of the truth", costs.Costs, "record_target", "even=plain", "even=True"),
    Mutant("a stall is a price", costs, "_credible", "_BAD_MOMENT * least", "math.inf"),
    Mutant("what is seen often is a stall", costs, "_credible", "times[width] > HARDLY or", ""),
    Mutant("a table on disk is right", costs.Costs, "_off", "return _ratio(measured, said[place])", "return 1.0"),
    Mutant("it is right about plain steps", costs.Costs, "plain", ' * self._off("target", *place)', ""),
    Mutant("it is right where nothing was measured", costs.Costs, "_seconds", "off * seconds", "seconds"),
    Mutant("it outvotes what is measured", costs.Costs, "_seconds", "said.items()} | measured", "said.items()}"),
    Mutant("what is long ago holds", C, "renews", "return stale", "return False"),
    Mutant("nothing is hoped for", policy.Pace, "_seems_best", "requests, rows, _HOPE", "requests, rows, -4.0"),
    Mutant("what it missed is free until then", prices.Prices, "catch_up", ", self.reading", ""),
    Mutant(
        "equal prompts are read anew",
        model_drafter.ModelDrafter,
        "unread",
        "{tuple(row.sequence.tokens[:-1]) for row in rows if self._reads(row)}",
        "[row.sequence.tokens[:-1] for row in rows]",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
