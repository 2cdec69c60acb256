"""Trees and lossy rules end to end: an exported pair, the real engine, the command line, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from leadout.bundle import Bundle, dump
from leadout.errors import UsageError
from leadout.runtime import check
from leadout.runtime.bench import Bench
from leadout.runtime.pair import Pair, load
from leadout.scripts.cli import main

pytestmark = pytest.mark.slow
PROMPTS = ["def f(x):\n", "import json", "class A:\n    def __init__"]
TREE = {"draft": "model", "branches": (3, 2, 1), "max_new_tokens": 30}


@pytest.fixture(scope="module")
def pair(tiny_bundle: Path) -> Iterator[Pair]:
    with load(tiny_bundle, threads=1) as made:
        yield made


def test_a_tree_s_answer_is_the_target_s_but_for_near_ties(pair: Pair) -> None:
    """Alone (graph tree_gqa) and in a batch (tree); greedy and with a seed."""
    prompts = [pair.token_ids(prompt) for prompt in PROMPTS]
    assert check.check_trees(pair, prompts).ok
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        wanted = {"max_new_tokens": 30, **sampling}
        alone = [pair.generate(prompt, draft="none", **wanted).token_ids for prompt in prompts]
        for results in (
            [pair.generate(prompt, **TREE, **sampling) for prompt in prompts],
            pair.generate(prompts, **TREE, **sampling),
        ):
            found = [result.token_ids for result in results]
            assert check.alike("", pair, prompts, alone, found, wanted).ok
            assert not any(result.lossless for result in results), "not to the last bit"
            assert sum(result.stats.accepted for result in results) > 10
            assert all(result.distance == 0 and len(result.stats.tested_per_position) <= 3 for result in results)


def test_a_sampled_tree_repeats_with_its_seed(pair: Pair) -> None:
    first, second = (pair.generate(PROMPTS[0], temperature=1.0, seed=3, rule="rejection", **TREE) for _ in range(2))
    assert first.token_ids == second.token_ids and first.rule == "rejection"


def test_the_command_line_draws_trees_and_marks_what_is_lossy(tiny_bundle: Path) -> None:
    line = ["generate", str(tiny_bundle), "-p", PROMPTS[0], "--json", "--draft", "model", "--max-new-tokens", "30"]
    tree = CliRunner().invoke(main, [*line, "--branches", "2,2"])
    row = json.loads(tree.stdout)
    assert row["stats"]["drafted"] > 2 * row["stats"]["accepted"] and not row["lossless"]
    assert CliRunner().invoke(main, [*line, "--branches", "2,x"]).exit_code == 2
    lossy = CliRunner().invoke(main, [*line, "--rule", "lenient", "--leniency", "0.1"])
    row = json.loads(lossy.stdout)
    assert (row["rule"], row["lossless"], row["seed"]) == ("lenient", False, None) and 0 < row["distance"] <= 1
    shown = CliRunner().invoke(main, [x for x in line if x != "--json"] + ["--temperature", "1", "--rule", "typical"])
    assert "LOSSY: 0." in shown.stderr and "from the target's law a token" in shown.stderr


def test_a_bundle_from_before_is_told_what_to_do(tiny_bundle: Path, tmp_path: Path) -> None:
    old = shutil.copytree(tiny_bundle, tmp_path / "old")
    manifest = Bundle.read(old).manifest
    models = {
        role: dataclasses.replace(entry, variants={n: f for n, f in entry.variants.items() if "tree" not in n})
        for role, entry in manifest.models.items()
    }
    (old / "leadout.json").write_text(dump(dataclasses.replace(manifest, models=models)))
    with load(old) as pair:
        with pytest.raises(UsageError, match=r"branches: the target has no graph for trees: .*export it again"):
            pair.generate(PROMPTS[0], **TREE)
        with pytest.raises(UsageError, match=r"draft 'auto' proposes no trees \(with branches: draft model\)"):
            pair.generate(PROMPTS[0], branches=(2,))


def test_bench_measures_trees_and_lossy_rules(pair: Pair) -> None:
    prompts = [pair.token_ids(prompt) for prompt in PROMPTS[:1]]
    wanted = {"draft": "model", "max_new_tokens": 12, "temperature": 0.0}
    report = Bench(pair, wanted | {"branches": (2, 1)}).run(prompts)
    assert report["predicted_speedup"] is None and report["identical_outputs"] is None
    assert report["tokens_per_round"] > 1 and report["distance"] == 0
    report = Bench(pair, wanted | {"rule": "lenient", "leniency": 0.05}).run(prompts)
    assert report["identical_outputs"] is None and report["distance"] > 0
