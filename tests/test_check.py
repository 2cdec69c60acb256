"""``leadout check`` and ``bench``: they pass what is right, and notice what is not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import leadout
from leadout.bundle import Bundle
from leadout.engines.toy import ToyEngine
from leadout.errors import CheckError, EngineError, UsageError
from leadout.runtime import bench, check
from leadout.runtime.bench import Bench
from leadout.runtime.divergence import NEAR_TIE, first_divergence, spread
from leadout.runtime.pair import Pair
from leadout.runtime.rules.noise import Noise
from leadout.runtime.settings import DRAFTS, Settings
from leadout.scripts.cli import main

pytestmark = pytest.mark.usefixtures("captures_once")

VOCAB = 16


def law(context: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = 1.0 + (np.arange(VOCAB) * (int(context[-1]) + 3)) % 7
    weights[(int(context.sum()) * 5 + 1) % VOCAB] = 100.0
    return np.asarray(weights / weights.sum())


class Rounding(ToyEngine):
    """A toy whose steps of one width round differently."""

    def __init__(self, width: int, error: float = 1e-3) -> None:
        super().__init__(law, VOCAB)
        self.width, self.error = width, error

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = super().forward(tokens, past_lens, logit_index)
        return logits + np.float32(self.error) if tokens.shape[1] == self.width else logits


@pytest.mark.parametrize("width", [2, 5, 9])
def test_a_width_that_rounds_differently_is_named(width: int) -> None:
    tokens = np.arange(12, dtype=np.int64)[None] % VOCAB
    assert check.check_widths("widths", ToyEngine(law, VOCAB), tokens).ok
    found = check.check_widths("widths", Rounding(width), tokens)
    assert not found.ok
    assert (f"{width} (by 1.0e-03)" in found.detail) or width == 2


def golden(error: float = 0.0) -> check.Golden:
    """Two rows of the toy's own logits, one of them wrong by ``error``."""
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 0]], np.int64)
    engine = ToyEngine(law, VOCAB)
    engine.reset(2)
    engine.reserve(4)
    logits = engine.forward(tokens, np.zeros(2, np.int64)).copy()
    ids = np.argsort(-logits, axis=-1)[..., :4]
    top = np.take_along_axis(logits, ids, -1)
    top[1, 2, 3] += error
    return check.Golden(tokens, np.array([4, 3]), ids.astype(np.int32), top)


def test_golden_parity_sees_one_wrong_logit_and_not_the_padding() -> None:
    engine = ToyEngine(law, VOCAB)
    assert check.check_parity("golden", engine, golden(), 1e-4).ok
    assert not check.check_parity("golden", engine, golden(2e-4), 1e-4).ok
    assert check.check_parity("golden", engine, golden(2e-4), 3e-4).ok


class Nowhere(ToyEngine):
    """A toy whose logits are no numbers where a step ends at a length, with and without states that follow."""

    def __init__(self, length: int) -> None:
        super().__init__(law, VOCAB)
        self.length, self.follows = length, True

    def commit(self, lengths: Any) -> None:
        self.follows = lengths != [0]

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = super().forward(tokens, past_lens, logit_index)
        if past_lens[0] + tokens.shape[1] == self.length:
            logits[0, -1] = np.nan
        return logits


def test_what_is_no_number_is_no_small_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = golden()
    for length in truth.lengths.tolist():
        assert not check.check_parity("parity", Nowhere(length), truth, 1.0).ok
    row = np.arange(12, dtype=np.int64)[None] % VOCAB
    assert not check.check_widths("widths", Nowhere(64), row, slack=1.0).ok  # where the row grows
    monkeypatch.setattr(check, "CommittingEngine", Nowhere)
    assert check.check_states("states", Nowhere(0), row, 1).ok
    assert not check.check_states("states", Nowhere(100), row, 1).ok


def test_models_that_can_give_no_answer_fail_the_check_and_not_the_command(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose states are not its text's: no step of it rounds like another, and a pair is not to be had."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise EngineError("on this processor its steps round by their width")

    monkeypatch.setattr(check, "check_model", lambda *_: iter([check.Check("target: exact answers", False, "no")]))
    monkeypatch.setattr(check, "load", refuses)
    result = CliRunner().invoke(main, ["check", str(tiny_bundle)])
    assert result.exit_code == CheckError.exit_code
    assert result.stdout.endswith("FAIL answers: on this processor its steps round by their width\n")
    assert result.stderr == "leadout: 3 of the checks failed, first: target: exact answers\n"


def test_what_is_allowed_follows_the_precision() -> None:
    model = SimpleNamespace(entry=SimpleNamespace(precision="fp32", parity={"int8": 0.5, "gqa": 0.25}))
    rows = golden()
    assert check.allowed(model, rows) == pytest.approx(1e-4 * np.abs(rows.logits).max())  # type: ignore[arg-type]
    model.entry.precision = "int8"
    assert check.allowed(model, rows) == 1.0  # type: ignore[arg-type]


def test_a_divergence_is_a_near_tie_or_a_fault() -> None:
    entry = SimpleNamespace(precision="fp32")
    bundle = SimpleNamespace(manifest=SimpleNamespace(models={"target": entry}))
    pair: Any = SimpleNamespace(target=ToyEngine(law, VOCAB), bundle=bundle)
    probabilities = law(np.array([1, 2, 3]))
    order = np.argsort(-probabilities).tolist()
    tied = next((a, b) for a, b in itertools.pairwise(order) if probabilities[a] == pytest.approx(probabilities[b]))
    assert first_divergence(pair, [1, 2], [3, tied[0]], [3, tied[0]]) is None
    near = first_divergence(pair, [1, 2], [3, tied[0], 1], [3, tied[1], 2])
    assert near is not None and near.position == 1 and near.near_tie and near.margin <= NEAR_TIE["fp32"]
    fault = first_divergence(pair, [1, 2], [3, order[0]], [3, order[1]])
    assert fault is not None and not fault.near_tie
    assert fault.margin == pytest.approx(np.log(probabilities[order[0]] / probabilities[order[1]]), rel=1e-4)
    shorter = first_divergence(pair, [1, 2], [3], [3, 4])
    assert shorter is not None and not shorter.near_tie


def test_what_rounding_explains_is_what_the_model_makes_of_it() -> None:
    """Plain steps of a deep quantised model may round by more than a small one's; wide ones are what is compared."""

    class Deep(Rounding):
        def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
            logits = ToyEngine.forward(self, tokens, past_lens, logit_index).copy()
            logits[..., 0] += np.float32(self.error if tokens.shape[1] == 1 else 0.0)
            return logits

    probabilities = law(np.array([1, 2, 3]))
    best, other = np.argsort(-probabilities)[:2].tolist()
    margin = float(np.log(probabilities[best] / probabilities[other]))
    for error in (0.4 * margin, 0.6 * margin):
        pair: Any = SimpleNamespace(target=Deep(1, error))
        found = first_divergence(pair, [1, 2], [3, best], [3, other])
        assert found is not None and found.margin == pytest.approx(margin, rel=1e-4)
        assert found.near_tie == (error > margin / 2)
        assert spread(pair.target, [1, 2, 3] * 30) == pytest.approx(error, rel=1e-3)
    assert spread(ToyEngine(law, VOCAB), [1, 2, 3]) == 0.0


def test_a_divergence_of_sampled_answers_is_measured_with_their_noise() -> None:
    pair: Any = SimpleNamespace(target=ToyEngine(law, VOCAB))
    settings = Settings(temperature=0.5, seed=7)
    logits = np.log(law(np.array([1, 2, 3])))
    scores = 2.0 * logits + Noise(7).gumbel(3, VOCAB)
    first, second = np.argsort(-scores)[:2].tolist()
    found = first_divergence(pair, [1, 2], [3, first], [3, second], settings)
    assert found is not None and found.position == 1
    assert found.margin == pytest.approx(scores[first] - scores[second], rel=1e-4)
    assert found.near_tie == (found.margin <= 2.0 * NEAR_TIE["fp32"])
    with pytest.raises(UsageError, match="with the seed"):
        first_divergence(pair, [1, 2], [3, first], [3, second], Settings(temperature=0.5, rule="coupled"))


@pytest.mark.parametrize("cut", ["top_k", "top_p", "min_p"])
def test_a_token_beyond_the_cut_is_as_near_as_it_missed_it(cut: str) -> None:
    """Rounding takes it in where it hardly missed; the noise may then lift it above all others."""
    pair: Any = SimpleNamespace(target=ToyEngine(law, VOCAB))
    law_here = law(np.array([1, 2, 3])) ** 2.0
    law_here /= law_here.sum()
    order = np.argsort(-law_here, kind="stable").tolist()
    at = next(i for i in range(2, VOCAB) if law_here[order[i]] < 0.9 * law_here[order[i - 1]])
    best, out = order[0], order[at]
    rank = float(np.log(law_here[order[at - 1]] / law_here[out]))
    before = float(law_here[order[:at]].sum())
    for short in (1e-3, 5e-2):
        value, missed = {
            "top_k": (at, rank),
            "top_p": (before * (1.0 - short), min(rank, -float(np.log1p(-short)))),
            "min_p": (float(law_here[out] / law_here[best]) * (1.0 + short), float(np.log1p(short))),
        }[cut]
        settings = Settings(temperature=0.5, seed=7, **{cut: value})
        for either in ((best, out), (out, best)):
            found = first_divergence(pair, [1, 2], [3, either[0]], [3, either[1]], settings)
            assert found is not None and found.margin == pytest.approx(missed, rel=1e-3, abs=1e-6)
            assert found.near_tie == (missed <= 2.0 * NEAR_TIE["fp32"])


@pytest.mark.parametrize("bend", ["logit_bias", "presence_penalty"])
def test_a_divergence_is_measured_behind_the_penalties(bend: str) -> None:
    """Where these make two tokens all but equal, rounding parts them, however far apart the logits are."""
    pair: Any = SimpleNamespace(target=ToyEngine(law, VOCAB))
    logits = np.log(law(np.array([1, 2, 3])))
    best, lead = int(logits.argmax()), float(logits.max() - logits[3])
    for gap in (1e-3, 1e-2):
        bent = {3: lead - gap} if bend == "logit_bias" else gap - lead  # 3 was written: a penalty below 0 lifts it
        found = first_divergence(pair, [1, 2], [3, best], [3, 3], Settings(**{bend: bent}))
        assert found is not None and found.margin == pytest.approx(gap, abs=1e-5)
        assert found.near_tie == (gap < NEAR_TIE["fp32"])


def test_widths_may_be_a_little_apart_where_kernels_are() -> None:
    tokens = np.arange(12, dtype=np.int64)[None] % VOCAB
    found = check.check_widths("widths", Rounding(5), tokens, 2e-3)
    assert found.ok and found.name == "widths 2 to 64" and "differ: 5 (by 1.0e-03)" in found.detail
    assert not check.check_widths("widths", Rounding(5), tokens, 5e-4).ok
    assert not check.check_widths("widths", Rounding(5), tokens).ok


def test_answers_that_differ_are_named() -> None:
    assert check.same("x", [[1], [2]], [[1], [2]]).ok
    found = check.same("x", [[1], [2]], [[1], [3]])
    assert not found.ok and found.detail == "prompt 1 differs"


@pytest.mark.slow
def test_an_int8_bundle_holds_every_promise(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    from leadout.export.build import export_pair

    found = list(check.run(export_pair(*tiny_pair, tmp_path / "int8", precision="int8"), threads=2))
    assert [(each.name, each.detail) for each in found if not each.ok] == []
    assert len({each.name for each in found}) == len(found) > 15


@pytest.mark.slow
def test_a_graph_that_the_draft_lacks_is_left_out_of_the_report_by_name(tiny_bundle: Path, tmp_path: Path) -> None:
    """Heads of 12, windows: such a draft has fewer graphs than its target."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / "leadout.json").read_text())
    del manifest["models"]["draft"]["variants"]["nonpad"]
    (bundle / "leadout.json").write_text(json.dumps(manifest))
    found = list(check.check_tokens(Bundle.read(bundle), {"target": "cpu", "draft": "cpu"}, 1))
    assert all(each.ok for each in found)
    details = {each.name.rpartition(", ")[2]: each.detail for each in found if "batch against alone" in each.name}
    assert details["nonpad"] == "left out: the draft has no such graph" and "prompts" in details["grouped"]


@pytest.mark.parametrize(
    ("context", "turns"),
    [
        (2, "left out: a context of 2 tokens is too short for two turns"),
        (3, "left out: a context of 3 tokens is too short for two turns"),
        (4, "3 tokens of 3 prompts"),
        (7, "3 tokens of 3 prompts"),
    ],
)
def test_of_a_short_context_what_fits_is_checked(tiny_bundle: Path, tmp_path: Path, context: int, turns: str) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / "leadout.json").read_text())
    for model in manifest["models"].values():
        model["max_context"] = context
    (bundle / "leadout.json").write_text(json.dumps(manifest))
    found = {each.name: each for each in check.check_tokens(Bundle.read(bundle), {"target": "cpu", "draft": "cpu"}, 1)}
    assert [each for each in found.values() if not each.ok] == []
    assert found["greedy: the next turn against read whole"].detail == turns
    assert "greedy: batch against alone, nonpad" in found, "those behind it, too"


@pytest.mark.slow
def test_bench_notices_a_draft_that_changes_the_text(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every draft accepted unseen, the answers are no longer the target's: identical_outputs must say so."""
    from leadout.runtime.rules import verify

    with leadout.load(tiny_bundle) as pair:
        settings = {"max_new_tokens": 12, "draft_length": 3, "ignore_eos": True}
        prompts = [pair.token_ids("x = 1"), pair.token_ids("def f(x):")]
        assert Bench(pair, settings).run(prompts)["identical_outputs"] is True
        monkeypatch.setattr(verify, "match", lambda x, choose: verify.Verdict(len(x), choose(len(x)), len(x)))
        assert Bench(pair, settings).run(prompts)["identical_outputs"] is False


def test_bench_compares_by_the_settings_that_it_ran_with(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(bench, "first_divergence", lambda *given: found.append(given[-1]))
    with leadout.load(tiny_bundle) as pair:
        Bench(pair, {"max_new_tokens": 2, "presence_penalty": 0.5}).run([pair.token_ids("x = 1")])
    assert [each.presence_penalty for each in found] == [0.5]


def test_bench_speaks_of_the_rows_that_ran(tiny_bundle: Path) -> None:
    with leadout.load(tiny_bundle) as pair:
        run = Bench(pair, {"max_new_tokens": 6}, batch_size=40)
        report = run.run([pair.token_ids("x = 1"), pair.token_ids("def f(x):")])
        assert report["batch_size"] == 2 and report["batch_gain"] > 0
        assert report["cost_ms"]["draft"] == 1e3 * run.speculative.costs.draft(2)
        assert report["cost_ms"]["plain_host"] == 1e3 * run.plain.costs.host(2)


@pytest.mark.slow
def test_the_demo_pair_in_int4_holds_every_promise(demo_bundle: Callable[[str], Path]) -> None:
    found = list(check.run(demo_bundle("int4")))
    assert [dataclasses.asdict(each) for each in found if not each.ok] == []


@pytest.mark.slow
def test_every_draft_writes_the_same_on_the_demo_pair(demo_bundle: Callable[[str], Path], held_out: list[str]) -> None:
    with leadout.load(demo_bundle("int4")) as pair:
        for settings in ({"temperature": 0.0}, {"temperature": 1.0, "rule": "coupled", "seed": 7}):
            drafts = [draft for draft in DRAFTS if draft != "siblings"]
            written = [continuations(pair, held_out[:4], draft, settings) for draft in drafts]
            assert written == [written[0]] * len(drafts)


def continuations(pair: Pair, prompts: list[str], draft: str, settings: dict[str, Any]) -> list[list[int]]:
    return [pair.generate(prompt, draft=draft, max_new_tokens=48, **settings).token_ids for prompt in prompts]
