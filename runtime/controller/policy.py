"""Decides how many tokens to draft this round, or none: from past rounds only, so that every rule stays exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ...engines.base import ANY, Widths
from ..drafters.confidence import GREEDY_PRIOR, SAMPLED_PRIOR, Sureness, Watch
from ..drafters.free import Calibration
from ..prefill import ALL
from ..rules.verify import Outcomes
from ..settings import MAX_DRAFT_LENGTH
from .acceptance import PRIOR_WEIGHT, Acceptance
from .bill import TRIAL, Bill
from .costs import Costs
from .gain import BY_DRAFTS, pays, worth
from .kinds import GREEDY, Kind
from .ledger import Ledger
from .prices import Prices
from .reading import Reading
from .rest import Rest
from .rounds import Round, Why
from .survey import Survey

_ROW_DECAY, _LASTING_DECAY = 0.95, 0.995  # per round: about the last 40 of a request count, the last 400 of all
_REFRESH, _SELDOM, _FRESH = 8, 32, 16
_PROBE_LENGTH = 2
_CLEAR = 1.6  # a gain so large is real however much a draft model in the cache slows the target's steps down
_SURE = 2.0  # standard errors of that slow-down, once it is measured: a gain that exceeds them is real, too
_HOPE = 1.0  # standard errors: drafting rests only if it would not pay even at an acceptance so much above that seen


class Seen:
    """What rounds of one kind of text showed of the draft model."""

    def __init__(self, kind: Kind) -> None:
        self.acceptance = Acceptance(_LASTING_DECAY)
        self.sureness = Calibration(SAMPLED_PRIOR if kind.sampled else GREEDY_PRIOR)
        self.bill = Bill()


class Pace:
    """What all requests of a decoder share about the draft model: prices, the acceptance seen so far, and whether it
    rests."""

    def __init__(self, costs: Costs, widths: Widths = ANY) -> None:
        """``widths`` as for ``Prices``."""
        self.prices = Prices(costs, widths)
        self._seen: dict[Kind, Seen] = {}
        self.ledger = Ledger()
        self.survey = Survey(self.prices, self.ledger)
        self.rest = Rest()
        self._reading = Reading(self.prices)
        self._standing: dict[tuple[int, ...], int] = {}  # lengths chosen since the last entry, by limits
        self._rounds, self._rows = 0, 1  # so far; of the last one

    def seen(self, kind: Kind) -> Seen:
        """What texts of this kind showed."""
        return self._seen.setdefault(kind, Seen(kind))

    def start(self) -> None:
        """New requests begin: the draft model does not rest, and is charged for the prompts that it read for the last
        ones."""
        self.enter()
        self.rest.restart()
        self._reading.end()

    def reach(self, policies: Sequence[Policy], room: int) -> int:
        """How many of a prompt's last tokens the draft model reads before answers of up to ``room`` tokens. All of them
        where a request has a fixed draft length: such a draft must not depend on measured times."""
        return self._reading.reach(len(policies), room) if bills_of(policies) else ALL

    def abstains(self, policies: Sequence[Policy], tokens: int) -> bool:
        """Whether a new text begins without the draft model because it loses on these bills. It then does not even read
        the prompt of ``tokens`` tokens, until it has rested long enough to pay for that and for a try."""
        bills = bills_of(policies)
        if not bills or not lose(bills):
            return False
        if not self.rest.affords(self.prices.reading * tokens + self._trial(bills, len(policies))):
            return True
        self._attempt(bills)
        return False

    def read(self, policies: Sequence[Policy], tokens: int, seconds: float) -> None:
        """The draft model read so many ``tokens`` of these requests' prompts, which took so long."""
        self._reading.begin(bills_of(policies), tokens, seconds)

    def enter(self) -> None:
        """Enter all that rounds have shown, so that every estimate is up to date."""
        self.ledger.enter()
        self._standing.clear()

    def tick(self, rows: int = 1, past: int = 0) -> Round:
        """A round begins, of so many ``rows`` on contexts of ``past`` tokens on average. Prices are looked up every 8
        rounds, every 32 while the draft model rests. A length that was chosen for what it promises is kept until the
        next entry of what rounds showed."""
        if self.ledger.tick():
            self._standing.clear()
        if self.rest.resting:
            self.rest.tick(self.prices.with_model(self._rows)[0])
        self._rounds, self._rows = self._rounds + 1, rows
        self.prices.past = past
        young = self._rounds < _FRESH
        self.ledger.due |= young
        if fresh := young or self._rounds % (_SELDOM if self.rest.resting else _REFRESH) == 0:
            self.prices.renew()
        self.survey.tick(fresh=fresh)
        return Round(rows)

    @property
    def idle(self) -> bool:
        """Whether the draft model rests in this round without asking if a try is due."""
        return self.rest.resting and self._rounds % _REFRESH != 0

    def lengths(
        self, this: Round, policies: Sequence[Policy], limits: Sequence[int], late: Callable[[], int] = lambda: 0
    ) -> list[int]:
        """The draft lengths of the requests in ``this`` round, each up to its limit. ``late()``: how many tokens the
        draft model still has to read.

        The draft model's steps are rectangles, so all requests without a fixed length get the same one: argmax of
        (expected tokens of all) / (expected seconds).
        """
        this.limits, requests = limits, list(zip(policies, limits, strict=True))
        if auto := [(policy, limit) for policy, limit in requests if isinstance(policy, AutoLength)]:
            self._choose(this, auto, late)
        return [max(0, min(policy.length(this), limit)) for policy, limit in requests]

    def settle(
        self, this: Round, policies: Sequence[Policy], tokens: Sequence[int], length: int, late: int, steps: int = 0
    ) -> None:
        """A round in which the draft model proposed is over: the ``tokens`` that each request got, the ``length`` of
        the longest draft, how many tokens were read ``late``, and the ``steps`` that were paid, if that is more (a
        draft that comes at once is asked for longer than it gets). Rounds that were made to measure are on no bill."""
        self._reading.proposed = True
        if this.why != "measured":
            drafted = length, max(length, steps)
            self.ledger.note(self._settle, this, bills_of(policies), tokens, drafted, late)

    def _settle(
        self, this: Round, bills: Sequence[Bill], tokens: Sequence[int], drafted: tuple[int, int], late: int
    ) -> None:
        prices, rows, (length, asked) = self.prices, this.rows, drafted
        unverified = prices.steps(rows)[asked] - prices.steps(rows)[length]
        took = prices.with_model(rows)[asked] - unverified + prices.catch_up(rows, late)
        plain, step = prices.with_model(rows)[0], prices.costs.host(rows) + prices.steps(rows)[0]
        # Without the model all steps would be shorter, by as much as plain steps are while it does not run.
        without = worth(tokens, BY_DRAFTS) * plain / max(rows, step * this.otherwise) * (1.0 + prices.costs.doubt(rows))
        for bill in bills:
            bill.record(without - took)

    def watch(self, this: Round, policies: Sequence[Policy], *, at_once: bool = False) -> Watch | None:
        """A Watch that ends the drafts of ``this`` round early, or lets them go on beyond the chosen length up to their
        limits; None where a length is fixed, measured or tried. Where the tokens of a draft come ``at_once``, they are
        paid for wherever the draft ends: then it may be twice as long as chosen, and only its verification is priced.
        """
        auto = [policy for policy in policies if isinstance(policy, AutoLength)]
        if not this.length or this.explores or len(auto) < len(policies):
            return None
        chances, rates = [policy.sureness.chances for policy in auto], [policy.rate for policy in auto]
        longest = min(MAX_DRAFT_LENGTH, 2 * this.length) if at_once else MAX_DRAFT_LENGTH
        seconds = self.prices.without_model(this.rows) if at_once else self.prices.with_model(this.rows)
        return Watch(chances, rates, [min(limit, longest) for limit in this.limits], seconds, self._local(this, auto))

    def _local(self, this: Round, auto: Sequence[AutoLength]) -> float:
        """Tokens a second in the last watched rounds of these requests, shrunk towards what the chosen length promises.
        This is the price of time: the rate at which their text is being written now."""
        seconds, length = self.prices.with_model(this.rows), this.length
        tokens = took = 0.0
        for policy in auto:
            seen = policy.sureness
            promised = policy.tokens[min(length, len(policy.tokens) - 1)]
            tokens += (PRIOR_WEIGHT * promised + seen.tokens) / (PRIOR_WEIGHT + seen.rounds)
            took += (PRIOR_WEIGHT * seconds[length] + seen.seconds) / (PRIOR_WEIGHT + seen.rounds) / len(auto)
        return tokens / took

    def _tries(self, this: Round, bills: Sequence[Bill], late: Callable[[], int]) -> bool:
        """Whether a try after a rest is due. All its time counts as cost, for it may bring nothing."""
        return self.rest.affords(self._trial(bills, this.rows) + self.prices.catch_up(this.rows, late()))

    def _trial(self, bills: Sequence[Bill], rows: int) -> float:
        """Seconds by which a try is longer than rounds without drafts. A try is one round, or, where the draft model
        loses on its bills, as many rounds as a new bill needs."""
        seconds = self.prices.with_model(rows)
        return (TRIAL if lose(bills) else 1) * (seconds[_PROBE_LENGTH] - seconds[0])

    def _attempt(self, bills: Sequence[Bill]) -> None:
        """The draft model is tried, and begins a new bill where it lost."""
        if lose(bills):
            for bill in bills:
                bill.clear()
        self.rest.attempt()

    def _try(self, bills: Sequence[Bill]) -> tuple[int, Why]:
        """A round that shows whether the draft model still does not pay; the next one knows."""
        self._attempt(bills)
        self.ledger.due = True
        return _PROBE_LENGTH, "tried"

    def _choose(self, this: Round, requests: Sequence[tuple[AutoLength, int]], late: Callable[[], int]) -> None:
        """Choose the length for these requests, each with its limit; it stays until what rounds showed is entered."""
        place = tuple(min(limit, MAX_DRAFT_LENGTH) for _, limit in requests)
        if standing := self._standing.get(place, 0):
            this.length = standing
        else:
            this.length, this.why = self._joint(this, requests, late)
            self._standing[place] = 0 if this.explores else this.length

    def _joint(
        self, this: Round, requests: Sequence[tuple[AutoLength, int]], late: Callable[[], int]
    ) -> tuple[int, Why]:
        rows, bills = this.rows, bills_of([request for request, _ in requests])
        if not self.rest.resting and lose(bills):
            self.rest.begin()
        if self.rest.resting and (self.idle or not self._tries(this, bills, late)):
            return 0, "promises"
        longest = min(max(limit for _, limit in requests), MAX_DRAFT_LENGTH)
        if longest <= 0:
            return 0, "promises"
        reach = max(request.reach for request, _ in requests)
        seems = partial(self._seems_best, requests, rows)
        first = self.survey.first_length(min(longest, reach), rows, seems)
        if first is not None:
            return first, "measured"
        if self.rest.resting:
            return self._try(bills)
        speeds = self._speeds([(request.tokens, limit) for request, limit in requests], rows)
        best = _largest(speeds)
        if longest >= reach:  # at the end of a text no draft is long enough to say
            self.survey.unclear = best > 0 and not any(bill.is_new for bill in bills) and self._hinges(speeds, rows)
        if not self._pays(speeds, best, rows):
            best = self._hoped(requests, rows)
        if not best:
            self.rest.begin()
            if self._tries(this, bills, late):  # as at the beginning of a text, of which it has read all there is
                return self._try(bills)
        elif not any(bill.is_new for bill in bills):
            self.rest.end()
        return best, "promises"

    def _pays(self, speeds: Sequence[float], length: int, rows: int, faster: float = 1.0) -> bool:
        """``faster``: a round without drafts is, by that factor."""
        seconds = self.prices.with_model(rows)
        return length > 0 and pays(speeds[length] / (faster * speeds[0]), seconds[length] / seconds[0])

    def _hinges(self, speeds: Sequence[float], rows: int) -> bool:
        """Whether drafting would no longer pay if plain steps were as short as their measurements still allow."""
        costs = self.prices.costs
        faster = math.exp(_SURE * costs.doubt(rows)) if costs.knows_plain else _CLEAR
        return not self._pays(speeds, _largest(speeds), rows, faster)

    def _hoped(self, requests: Sequence[tuple[AutoLength, int]], rows: int) -> int:
        """The length that would pay if acceptance were better than seen by _HOPE standard errors; else 0. (A draft
        model that rests must catch up first, so it seldom gets a second chance in a text.)"""
        speeds = self._hopes(requests, rows, _HOPE / math.sqrt(len(requests)))  # rows err each for itself
        best = _largest(speeds)
        return best if self._pays(speeds, best, rows) else 0

    def _seems_best(self, requests: Sequence[tuple[AutoLength, int]], rows: int) -> int:
        return _largest(self._hopes(requests, rows, _HOPE))

    def _hopes(self, requests: Sequence[tuple[AutoLength, int]], rows: int, errors: float) -> list[float]:
        """Tokens a second by length if acceptance is so many standard ``errors`` above what was seen of these
        requests."""
        return self._speeds([(request.hoped(errors), limit) for request, limit in requests], rows)

    def _speeds(self, requests: Sequence[tuple[Sequence[float], int]], rows: int) -> list[float]:
        """Expected tokens a second by length, of requests as (expected tokens, limit). A round without drafts counts at
        the low end of what is known of it: a bill shows when drafting was wrong, but nothing shows when resting was."""
        prices, speeds = self.prices, []
        for tokens, seconds in zip(_tokens_of(requests), prices.with_model(rows), strict=False):
            speeds.append(worth(tokens, BY_DRAFTS) / (seconds + prices.again(rows, max(tokens))))
        return [speeds[0] / (1.0 + self.prices.costs.doubt(rows)), *speeds[1:]]


def bills_of(policies: Sequence[Policy]) -> list[Bill]:
    """Each bill once; none where a length is fixed, for then nobody asks what it costs."""
    bills = [policy.bill for policy in policies if isinstance(policy, AutoLength)]
    return list(dict.fromkeys(bills)) if len(bills) == len(policies) else []


def lose(bills: Sequence[Bill]) -> bool:
    """Whether the draft model does not pay for any of them."""
    return all(bill.loses for bill in bills)


def _largest(values: Sequence[float]) -> int:
    return values.index(max(values))


def _tokens_of(requests: Sequence[tuple[Sequence[float], int]]) -> Iterable[Sequence[float]]:
    """Expected tokens of each request in a round with drafts of 0, 1, 2, ..., each up to its limit; as long as
    anything is added."""
    each = [list(tokens[: max(limit, 0) + 1]) for tokens, limit in requests]
    longest = max(map(len, each))
    return zip(*(tokens + tokens[-1:] * (longest - len(tokens)) for tokens in each), strict=True)


class FixedLength:
    """Always the same length."""

    def __init__(self, fixed: int) -> None:
        self._fixed = fixed

    def length(self, this: Round) -> int:
        """Of the drafts of ``this`` round."""
        return self._fixed

    def observe(self, outcomes: Outcomes, classes: Sequence[int] = (), rows: int = 1) -> None:
        """Changes nothing."""


class AutoLength:
    """What one request's rounds say about its drafts; how long they get is its Pace's to say."""

    def __init__(self, pace: Pace, kind: Kind = GREEDY) -> None:
        self._pace, seen = pace, pace.seen(kind)
        self._lasting, self.bill = seen.acceptance, seen.bill
        self._acceptance = Acceptance(_ROW_DECAY, self._lasting)
        self.tokens = self._acceptance.expected_tokens()
        self.sureness = Sureness(seen.sureness)

    def length(self, this: Round) -> int:
        """Of the drafts of ``this`` round: what was chosen for all rows that share it."""
        return this.length

    def hoped(self, errors: float) -> list[float]:
        """``tokens`` if acceptance is so many standard errors better than what was seen."""
        return self._acceptance.expected_tokens(errors)

    @property
    def rate(self) -> float:
        """How many tested drafts are accepted."""
        return self._acceptance.rate()

    def observe(self, outcomes: Outcomes, classes: Sequence[int] = (), rows: int = 1) -> None:
        """What a round's verdict was (nothing if nothing was drafted); how sure the draft was of its tokens; how many
        ``rows`` shared the step."""
        if outcomes:
            if classes:
                self.sureness.record(classes, outcomes, self._pace.prices.with_model(rows)[len(classes)])
            self._acceptance.observe(outcomes)
            self._lasting.observe(outcomes)
            self.tokens = self._acceptance.expected_tokens()

    @property
    def reach(self) -> int:
        """The longest draft of which anything is expected: longer ones need not be measured."""
        return len(self.tokens) - 1

    def speed(self, length: int, rows: int) -> float:
        """Expected tokens per expected second with drafts of ``length``."""
        prices, tokens = self._pace.prices, self.tokens[min(length, len(self.tokens) - 1)]
        return tokens / (prices.with_model(rows)[length] + prices.again(rows, tokens))


Policy = FixedLength | AutoLength
