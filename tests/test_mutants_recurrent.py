"""The tests of recurrent layers are tested: each of these bugs, put into the production source, must be found."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support_recurrent import HOLD  # noqa: E402
from test_export_architectures import build, tiny  # noqa: E402
from test_mutants import Mutant, must_die, mutate  # noqa: E402
from test_recurrent import test_a_draft_model_s_steps_are_taken_back_whole as drafts_are_taken_back  # noqa: E402
from test_recurrent import test_a_row_whose_copy_is_interrupted_begins_anew as copies_are_interrupted  # noqa: E402
from test_recurrent import test_a_step_that_fails_or_is_interrupted_changes_nothing as steps_fail  # noqa: E402
from test_recurrent import test_rounds_give_the_bits_of_reading_the_text_once as rounds_hold  # noqa: E402
from test_recurrent import test_rows_go_their_own_ways as rows_hold  # noqa: E402
from test_recurrent import test_rows_that_a_step_leaves_out_stay_as_they_are as others_stay  # noqa: E402
from test_recurrent import test_speculation_changes_nothing as speculation_holds  # noqa: E402
from test_recurrent import test_uncommitted_tokens_can_be_taken_back_for_a_widest_step as much_is_taken_back  # noqa: E402
from test_recurrent import test_what_was_committed_is_what_is_read_again as little_is_read_again  # noqa: E402

from leadout.bundle import Model, Recurrence  # noqa: E402
from leadout.engines.ort import SlotEngine  # noqa: E402
from leadout.engines.trails import Trails  # noqa: E402
from leadout.errors import ExportError  # noqa: E402
from leadout.export.capture import decoder_graph, recurrent  # noqa: E402
from leadout.runtime import steps  # noqa: E402
from leadout.runtime.decoder import Decoder  # noqa: E402
from leadout.runtime.drafters.model_drafter import ModelDrafter  # noqa: E402

pytestmark = pytest.mark.usefixtures("captures_once")


def made(name: str, folder: Path) -> Model:
    return Model(folder, build(tiny(name), folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: made(name, tmp_path_factory.mktemp(name) / "target") for name in ("qwen3_5", "granite_4_h")}


def checks(models):
    """Those that tell a wrong bit, by one architecture."""
    model = models["qwen3_5"]

    def alone(check, **options):
        def run(monkeypatch):
            engine = SlotEngine(model, exact=True)
            check(model, engine, **options)
            engine.close()

        return run

    found = [  # those first that take least
        lambda monkeypatch: copies_are_interrupted(model, monkeypatch),
        lambda monkeypatch: others_stay(model),
        lambda monkeypatch: little_is_read_again(models),
        lambda monkeypatch: alone(functools.partial(steps_fail, fault=RuntimeError("no"), monkeypatch=monkeypatch))(
            None
        ),
        alone(much_is_taken_back),
        alone(rounds_hold, seed=0),
        lambda monkeypatch: rows_hold(model),
        alone(drafts_are_taken_back, seed=0),
        lambda monkeypatch: speculation_holds(models, model, {}, "model", 0.0),
    ]
    return [functools.partial(noticing, check) for check in found]


def noticing(check, monkeypatch):
    """An error that was not raised is a failure like any other."""
    try:
        check(monkeypatch)
    except pytest.fail.Exception as error:
        raise AssertionError(str(error)) from None


MUTANTS = [
    Mutant("states that nobody committed are taken over", Trails, "took", "return", "pass"),
    Mutant("states are never taken over", Trails, "took", "if not full and", "if"),
    Mutant(
        "rows that a step leaves out lose their states",
        Trails,
        "turn",
        "self._fetch(row)",
        "pass",
    ),
    Mutant("rows that a step leaves out are where the others are", Trails, "took", "*there[len(past) :]", "*[written]"),
    Mutant("anchors of rows that a step leaves out go along", Trails, "took", "*anchors[len(past) :]", "*past[:1]"),
    Mutant("a row that begins anew keeps its states", Trails, "_begin", "buffer.array[row] = 0", "pass"),
    Mutant("a row that begins anew keeps what was committed", Trails, "_begin", "self._committed[row] = 0", "pass"),
    Mutant("a copy has its old anchor", Trails, "copy_row", "self.anchors[source],", "0,"),
    Mutant(
        "a copy has its old trails",
        Trails,
        "copy_row",
        "(*self._trails, *self._states[there])",
        "self._states[there]",
    ),
    Mutant("a copy has its old states", Trails, "copy_row", "(*self._trails, *self._states[there])", "self._trails"),
    Mutant("a row that is being copied can be stepped", Trails, "copy_row", "_NOWHERE", "0"),
    Mutant(
        "states are written where they are read", Trails, "bindings", "self._states[1 - side]", "self._states[side]"
    ),
    Mutant("too little is read again", Trails, "turn", "behind - 1", "behind - 2"),
    Mutant("the buffer that was read first is read for ever", Trails, "turn", ", self._at[0]", ", 0"),
    Mutant("what is behind an anchor is stepped", Trails, "turn", "if length:", "if False:"),
    Mutant("a step may be too wide", Trails, "turn", "width > self._kept.widest", "False"),
    Mutant("trails are as short as a step", Recurrence, "widest", "// 2", ""),
    Mutant("a text goes on from behind an anchor", steps.Stepper, "resume", "max(1, self.earliest(0))", "1"),
    Mutant("the target commits nothing", Decoder, "_forward", "self._target.commit(past)", "pass"),
    Mutant("the draft commits nothing", ModelDrafter, "_begin", "self._stepper.commit(self._valid)", "pass"),
    Mutant(
        "the draft commits what it drafts",
        ModelDrafter,
        "_stepped",
        "commit(self._valid)",
        "commit([v + 9 for v in self._valid])",
    ),
]


def test_healthy_code_passes(models, monkeypatch):
    for check in checks(models):
        check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_of_trails_is_killed(mutant, models, monkeypatch):
    must_die(mutant, checks(models), monkeypatch)


@pytest.mark.parametrize("check", HOLD, ids=lambda check: check.__name__)
def test_healthy_pieces_say_what_transformers_functions_say(check, monkeypatch):
    check(monkeypatch)


MEMORY = recurrent.Memory
GRAPHS = [  # by the model that tells it soonest: of a convolution alone, a delta rule, a state space
    (
        "granite_4_h",
        Mutant("tokens that are not behind change states", MEMORY, "recur", "positions < self", "positions <= self"),
    ),
    (
        "granite_4_h",
        Mutant("whoever is not behind changes states", MEMORY, "recur", "torch.where(behind, ", "(lambda x, _: x)("),
    ),
    ("granite_4_h", Mutant("states are those of the anchor", MEMORY, "recur", "_, state = _attend", "_, _ = _attend")),
    (
        "granite_4_h",
        Mutant("groups of keys are taken in turn", recurrent, "_attend", "groups, 1, width)", "1, groups, width)"),
    ),
    (
        "lfm2",
        Mutant("trails are no rings", MEMORY, "rows", "torch.remainder(positions, trail.shape[1])", "positions"),
    ),
    (
        "lfm2",
        Mutant(
            "convolutions read another token",
            recurrent.TrailLayer,
            "update_conv_state",
            "torch.arange(-before, 0)",
            "torch.arange(-before - 1, -1)",
        ),
    ),
    (
        "lfm2",
        Mutant(
            "what is before a text is in it",
            recurrent.TrailLayer,
            "update_conv_state",
            "positions >= 0",
            "positions >= -9",
        ),
    ),
    ("granite_4_h", Mutant("no activation", recurrent, "convolve", "activation is None", "True")),
    ("lfm2", Mutant("a tap is left out", recurrent, "convolve", "sum(taps[1:]", "sum(taps[2:]")),
    (
        "qwen3_5",
        Mutant(
            "keys are as long as they come", recurrent, "gated_delta_rule", "if use_qk_l2norm_in_kernel:", "if False:"
        ),
    ),
    (
        "qwen3_5",
        Mutant("queries are as long as keys", recurrent, "gated_delta_rule", "* query.shape[-1] ** -0.5", ""),
    ),
    (
        "granite_4_h",
        Mutant(
            "time steps are as they come", recurrent, "scan", "nn.functional.softplus(dt) if dt_softplus else dt", "dt"
        ),
    ),
    (
        "granite_4_h",
        Mutant("nothing goes past the scan", recurrent, "scan", "out + D.unsqueeze(-1) * hidden_states", "out"),
    ),
    (
        "olmo_hybrid",
        Mutant("a token's Softplus rounds by its company", decoder_graph, "evenly", "width % _AT_ONCE:", "False:"),
    ),
]


@pytest.mark.parametrize(("name", "mutant"), GRAPHS, ids=[mutant.bug for _, mutant in GRAPHS])
def test_mutant_of_graphs_is_killed(name, mutant, tmp_path: Path, monkeypatch):
    """By transformers' functions beside the pieces alone, which takes no capture; else by parity with its models, and
    what is around a trail by longer texts. These hold for the healthy models: above, and in the tests of recurrent
    layers and of architectures."""

    def parity(monkeypatch):
        for key, function in recurrent._FUNCTIONS.items():
            monkeypatch.setitem(recurrent._FUNCTIONS, key, getattr(recurrent, function.__name__))
        model = made(name, tmp_path / "target")
        engine = SlotEngine(model, exact=True)
        drafts_are_taken_back(model, engine, seed=0)
        engine.reset(1)
        much_is_taken_back(model, engine)
        engine.close()

    must_die(mutant, [*HOLD, parity], monkeypatch)


def test_an_export_of_layers_that_have_each_other_s_states_is_refused(tmp_path: Path, monkeypatch):
    """Parity with transformers sees states, not only what is read again."""
    mutate(
        monkeypatch,
        Mutant("all have the first's", MEMORY, "recur", "self.states[len(self.new_states)]", "self.states[0]"),
    )
    with pytest.raises(ExportError, match="FalconH1ForCausalLM, capture: logits differ from transformers"):
        made("falcon_h1", tmp_path / "target")
