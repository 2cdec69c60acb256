"""A grown checkpoint computes what the small one does, whatever it has more of."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import torch
from transformers import AutoModelForCausalLM

from leadout.scripts.grow import grow, hybrid_of, mixture_of, write_grown

TOKENS = torch.randint(1, 512, (2, 40), generator=torch.Generator().manual_seed(0))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize("shape", [(2, 128, None), (5, 128, 64), (2, 200, 64), (2, 128, 256), (4, 160, 1024)])
def test_what_is_computed_is_the_same(tiny_pair: tuple[Path, Path], shape: tuple[int, int, int | None]) -> None:
    small = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    large = grow(tiny_pair[0], *shape)
    expected = logits(small)
    assert (logits(large) - expected).abs().max() < 1e-5 * expected.abs().max()
    layers, intermediate, hidden = shape
    assert large.config.num_hidden_layers == layers and large.config.intermediate_size == intermediate
    assert large.get_input_embeddings().weight.shape[1] == (hidden or 64)


def test_saved_it_is_still_the_same(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """In bfloat16, which holds every weight of the small one as it was saved so."""
    small = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.bfloat16)
    small.save_pretrained(tmp_path / "small")
    count = write_grown(tmp_path / "small", tmp_path / "large", 3, 192, 256)
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32)
    assert sum(weight.numel() for weight in large.parameters()) == count
    expected = logits(small.float())
    assert (logits(large) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 128, None), "can only grow: the checkpoint has 2 layers and 128 units"),
        ((2, 64, None), "can only grow"),
        ((2, 128, 128), "hidden must be 64 or 4, 16 or 64 times that, not 128"),
    ],
)
def test_what_cannot_grow_is_refused(
    tiny_pair: tuple[Path, Path], shape: tuple[int, int, int | None], message: str
) -> None:
    with pytest.raises(click.UsageError, match=message):
        grow(tiny_pair[0], *shape)


def test_a_mixture_of_copies_is_the_same_whoever_is_chosen(tiny_pair: tuple[Path, Path]) -> None:
    small = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    expected = logits(small)
    mixture = mixture_of(grow(tiny_pair[0], 3, 160, 256), 7, 3)
    assert (logits(mixture) - expected).abs().max() < 1e-5 * expected.abs().max()
    with torch.no_grad():
        chosen = mixture(TOKENS, output_router_logits=True).router_logits
    assert len(chosen) == 3 and all(len(layer.argmax(-1).unique()) == 7 for layer in chosen), "all have work to do"


@pytest.mark.parametrize(("experts", "per_token"), [(4, 4), (2, 0), (1, 1)])
def test_a_mixture_that_chooses_nothing_is_refused(tiny_pair: tuple[Path, Path], experts: int, per_token: int) -> None:
    with pytest.raises(click.UsageError, match=f"from 1 to less than experts \\({experts}\\), not {per_token}"):
        mixture_of(grow(tiny_pair[0], 2, 128), experts, per_token)


def test_state_spaces_that_say_nothing_change_nothing(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    expected = logits(small)
    hybrid = hybrid_of(grow(tiny_pair[0], 5, 160, 256), 2)
    assert (logits(hybrid) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert hybrid.config.layer_types == ["full_attention"] * 2 + ["linear_attention"] * 3
    count = write_grown(tiny_pair[0], tmp_path / "hybrid", 5, 160, 256, state_spaces=True)
    assert count == sum(weight.numel() for weight in hybrid.parameters())


def test_hybrids_that_are_none_are_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match="state-spaces are the layers beyond the checkpoint's 2; layers is 2"):
        hybrid_of(grow(tiny_pair[0], 2, 128), 2)
    with pytest.raises(click.UsageError, match="two kinds of grown models"):
        write_grown(tiny_pair[0], tmp_path / "both", 3, 128, experts=4, state_spaces=True)
