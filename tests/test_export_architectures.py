"""Every architecture we name, as a tiny random model: the graphs equal transformers in all four situations.

Windows are shorter than the rows, softcaps bite, weights are spread so that logits differ by whole units.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support_captures import folder_of, offer  # noqa: E402
from transformers.models.llama4 import modeling_llama4  # noqa: E402

from leadout.bundle import Model  # noqa: E402
from leadout.engines import open_engine  # noqa: E402
from leadout.engines.base import EVEN, RAGGED  # noqa: E402
from leadout.errors import ExportError  # noqa: E402
from leadout.export.build import export_model, silent  # noqa: E402
from leadout.export.canonical import Canonical, capture_to, simplify_and_pack  # noqa: E402
from leadout.export.capture.kept import graph_layers, kept  # noqa: E402
from leadout.export.capture.lowerings import is_complex_turn, lowered  # noqa: E402
from leadout.export.capture.recurrent import Memory  # noqa: E402
from leadout.export.capture.refusals import context_length  # noqa: E402
from leadout.export.checkpoints.checkpoint import Checkpoint  # noqa: E402
from leadout.export.drafts.eagle import FeatureHead  # noqa: E402
from leadout.export.golden import compute_truth  # noqa: E402
from leadout.export.graphs.smooth import Rounding, observe, smooth  # noqa: E402
from leadout.export.parity import check_graph  # noqa: E402
from leadout.runtime.check import stepped  # noqa: E402

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = BASE | {"num_key_value_heads": 2}
OPT = {key: BASE[key] for key in BASE if key != "intermediate_size"} | {"ffn_dim": 128, "word_embed_proj_dim": 64}
FALCON = {key: BASE[key] for key in BASE if key != "intermediate_size"}
GEMMA = GROUPED | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
THREE = {"num_hidden_layers": 3}
DELTA = GROUPED | {"head_dim": 16, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
DELTA |= {"linear_num_value_heads": 4, "linear_value_head_dim": 24}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
SPACES = GROUPED | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "head_dim": 16}
LATENT = GROUPED | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}

# name -> configuration class, its arguments, and the variants besides the canonical graph that must come out
CONFIGS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("LlamaConfig", GROUPED, {"gqa", "nonpad"}),
    "llama_heads_of_12": ("LlamaConfig", GROUPED | {"head_dim": 12}, {"grouped", "nonpad", "tree"}),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 8}, {"gqa"}),
    "qwen2": ("Qwen2Config", GROUPED | {"tie_word_embeddings": True}, {"gqa", "nonpad"}),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 32}, {"gqa", "nonpad"}),
    "gemma2": (
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        {"gqa", "nonpad"},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
        {"gqa", "nonpad"},
    ),
    "gemma4_shared": (  # the last two layers read the keys and values of the two before
        "Gemma4TextConfig",
        GROUPED
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16, "sliding_window": 8}
        | {"vocab_size_per_layer_input": 256}  # a table of its own, of 256 Mi numbers by default
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"grouped", "nonpad", "tree"},
    ),
    "phi3": ("Phi3Config", GROUPED, {"gqa", "nonpad"}),
    "phi3_longrope": (
        "Phi3Config",
        GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        {"gqa", "nonpad"},
    ),
    "phimoe_longrope": (  # which asks for a scale by the length of the text, too
        "PhimoeConfig",
        GROUPED
        | {"num_local_experts": 4, "rope_parameters": LONGROPE | {"short_mscale": 1.25, "long_mscale": 1.5}}
        | {"original_max_position_embeddings": 64},
        {"gqa", "nonpad"},
    ),
    "smollm3": ("SmolLM3Config", GROUPED | {"no_rope_layers": [1, 0]}, {"gqa", "nonpad"}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1}
        | {"eos_token_id": 2},
        {"gqa", "nonpad"},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {key: BASE[key] for key in BASE if key not in ("intermediate_size", "num_hidden_layers", "num_attention_heads")}
        | {"num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
        set(),
    ),
    "gpt_neox": ("GPTNeoXConfig", BASE, {"gqa", "nonpad"}),
    "opt": ("OPTConfig", OPT, {"gqa", "nonpad"}),
    "granite": (
        "GraniteConfig",
        GROUPED
        | {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
        {"gqa", "nonpad"},
    ),
    "granite_4": (  # of a class that may keep state
        "GraniteMoeHybridConfig",
        GROUPED
        | {"layer_types": ["attention"], "num_local_experts": 0, "shared_intermediate_size": 128}
        | {"mamba_n_heads": 8, "mamba_d_head": 16, "position_embedding_type": "rope"},
        {"gqa", "nonpad"},
    ),
    "deepseek_v2": ("DeepseekV2Config", LATENT | {"num_experts_per_tok": 2, "first_k_dense_replace": 0}, {"grouped"}),
    "afmoe": (  # looks at what attention gives by a view
        "AfmoeConfig",
        GROUPED
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"sliding_window": 8, "num_dense_layers": 1},
        {"gqa"},
    ),
    "olmo2": ("Olmo2Config", GROUPED, {"gqa", "nonpad"}),
    "starcoder2": ("Starcoder2Config", GROUPED, {"gqa", "nonpad"}),
    "stablelm": ("StableLmConfig", GROUPED, {"gqa", "nonpad"}),
    "cohere": ("CohereConfig", GROUPED, {"gqa", "nonpad"}),
    "falcon": (
        "FalconConfig",
        FALCON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"gqa", "nonpad"},
    ),
    "falcon_7b": ("FalconConfig", FALCON | {"alibi": False}, {"gqa", "nonpad"}),  # one head of keys for all
    "gpt_oss": (
        "GptOssConfig",
        GROUPED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        {"gqa"},
    ),
    "flint": ("FlintConfig", GROUPED | {"head_dim": 16}, {"gqa"}),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, {"gqa", "nonpad"}),
    "lfm2": ("Lfm2Config", GROUPED | THREE | {"layer_types": ["conv", "full_attention", "conv"]}, {"gqa", "nonpad"}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        GROUPED
        | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"gqa", "nonpad"},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA, {"gqa", "nonpad"}),
    "qwen3_next": (
        "Qwen3NextConfig",
        DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
        {"gqa", "nonpad"},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        DELTA | {"linear_num_value_heads": 2, "linear_value_head_dim": 32},
        {"gqa", "nonpad"},
    ),
    "granite_4_h": (
        "GraniteMoeHybridConfig",
        SPACES | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 128},
        {"gqa", "nonpad"},
    ),
    "falcon_h1": ("FalconH1Config", SPACES | {"mamba_d_ssm": 128, "num_hidden_layers": 2}, {"gqa", "nonpad"}),
    "bamba": ("BambaConfig", SPACES | {"attn_layer_indices": [1], "num_hidden_layers": 2}, {"gqa", "nonpad"}),
    "nemotron_h": (
        "NemotronHConfig",
        GROUPED
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16},
        {"gqa", "nonpad"},
    ),
    "zamba2": (
        "Zamba2Config",
        GROUPED
        | {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "num_hidden_layers": 2}
        | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
        {"gqa", "nonpad"},
    ),
}
# Of layers that are all alike one tells what the architecture does. What comes of several these tell: Llama, those with
# layers of two kinds, those that keep two states.
KINDS = {"llama", "gemma2", "gemma3", "gemma4_shared", "smollm3", "afmoe", "gpt_oss", "lfm2", "lfm2_moe", "qwen3_5"}
KINDS |= {"qwen3_next", "olmo_hybrid", "granite_4_h", "falcon_h1", "bamba", "nemotron_h", "zamba2"}
# How many values can be scaled before rounding: three in each layer and one before the head, but where norms come after
# products, activations bend what goes on, a router chooses, or one norm serves attention and the rest.
SCALED = dict.fromkeys(CONFIGS, 4) | dict.fromkeys(KINDS, 7)
SCALED |= dict.fromkeys(("gpt2", "gpt_neo", "gpt_neox", "starcoder2", "falcon", "cohere"), 3)
SCALED |= {"olmo2": 2, "mixtral": 2, "falcon_7b": 2, "gpt_oss": 3, "afmoe": 6, "gemma4_shared": 13}
SCALED |= {"lfm2": 10, "lfm2_moe": 5, "qwen3_next": 5, "olmo_hybrid": 5, "granite_4_h": 8, "bamba": 8}
SCALED |= {"nemotron_h": 5, "zamba2": 9, "phimoe_longrope": 2}
QUICK = {"llama", "llama_heads_of_12", "gemma2", "gpt2"}
STEPPED = {"lfm2", "qwen3_5", "falcon_h1", "granite_4_h"}  # whose steps ``test_recurrent`` looks at


def shortest(name: str) -> Checkpoint:
    """``tiny``, of no more layers than tell something."""
    return tiny(name) if name in KINDS else tiny(name, num_hidden_layers=1)


def tiny(name: str, **changes: Any) -> Checkpoint:
    """``spread``, of CONFIGS."""
    kind, arguments, _ = CONFIGS[name]
    return spread(name, getattr(transformers, kind)(**arguments | changes))


def spread(name: str, config: Any) -> Checkpoint:
    """A random model, spread so that its logits reach about 2."""
    noise = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=noise)
            if weight.dim() >= 2:
                weight.copy_(0.08 * drawn)
            elif "norm" in key or "ln" in key:
                weight.add_(0.1 * drawn)
            elif "sink" in key:
                weight.copy_(drawn)
            else:
                weight.copy_(0.05 * drawn)
    return Checkpoint(name, model, 256, context_length(config), 1, (2,), {})


def build(checkpoint: Checkpoint, folder: Path, progress: Callable[[str], None] = silent) -> Any:
    return export_model(canonical(checkpoint, folder, progress), folder, "fp32", progress)


def canonical(checkpoint: Checkpoint, folder: Path, progress: Callable[[str], None] = silent) -> Canonical:
    folder.mkdir()
    captured = capture_to(folder.parent / "scratch" / folder.name, checkpoint, compute_truth(checkpoint), progress)
    return simplify_and_pack(captured, progress)


def reading_head() -> FeatureHead:
    torch.manual_seed(1)
    its = {"join": "attention", "taps": [1, 2], "target_hidden_size": 64, "draft_vocab_size": 256}
    return FeatureHead(transformers.LlamaConfig(**GROUPED | {"num_hidden_layers": 1} | its)).eval()


@pytest.fixture(scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Canonical]:
    """An architecture, captured for a head that reads its features: captures are what takes time here."""
    head, checkpoint = reading_head(), shortest(request.param)
    folder = tmp_path_factory.mktemp("read") / "target"
    return request.param, capture_to(folder, checkpoint, compute_truth(checkpoint, head), silent, reader=head)


def copied(captured: Canonical, folder: Path) -> Canonical:
    """Checking a graph uses its files up."""
    shutil.copytree(captured.graph.parent, folder)
    return dataclasses.replace(captured, graph=folder / captured.graph.name)


def unread(captured: Canonical, folder: Path) -> Canonical:
    """The same as no head reads it: no features, nor anything that is there for them alone."""
    graph = ir.load(captured.graph)
    assert graph.graph.outputs.pop().name == "features"
    for n in reversed(list(graph.graph)):
        if not any(value.uses() or value.is_graph_output() for value in n.outputs):
            graph.graph.remove(n, safe=True)
    for value in [value for value in graph.graph.initializers.values() if not value.uses()]:
        del graph.graph.initializers[value.name]
    folder.mkdir(parents=True)
    ir.save(graph, folder / "capture.onnx", external_data="capture.data")
    truth, entry = (dataclasses.replace(each, features=None) for each in (captured.truth, captured.entry))
    return dataclasses.replace(captured, graph=folder / "capture.onnx", truth=truth, entry=entry)


def said(graph: Path) -> tuple[str, dict[str, bytes]]:
    """All that a file says: its nodes and what goes in and out; its weights."""
    model = ir.load(graph)
    weights = {name: value.const_value.tobytes() for name, value in model.graph.initializers.items()}
    ends = [str(value) for value in (*model.graph.inputs, *model.graph.outputs)]
    return "\n".join([*ends, *map(str, model.graph)]), weights


def a_head_changes_nothing_else(name: str, found: Canonical, folder: Path) -> None:
    """``unread`` is what is captured without a head, to the last weight."""
    checkpoint = shortest(name)
    alone = capture_to(folder / "target", checkpoint, compute_truth(checkpoint), silent)
    assert found.entry == alone.entry
    assert said(found.graph) == said(alone.graph)
    assert np.array_equal(found.truth.tokens, alone.truth.tokens)
    assert np.array_equal(found.truth.logits, alone.truth.logits)


def test_graphs_equal_transformers(
    read: tuple[str, Canonical], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A head that reads features changes nothing else: shown of a few, so that one capture may do for the others."""
    name, captured = read[0], unread(read[1], tmp_path / "scratch" / "target")
    if name in QUICK:
        a_head_changes_nothing_else(name, captured, tmp_path / "alone")
    if name in STEPPED:
        offer(folder_of(tmp_path_factory.getbasetemp()), tiny(name).model, captured.graph.parent)
    packed = simplify_and_pack(captured, silent)
    (tmp_path / "target").mkdir()
    entry = export_model(packed, tmp_path / "target", "fp32", silent)
    assert max(entry.parity.values()) <= 1e-4, entry.parity
    wanted = CONFIGS[name][2] | ({*EVEN, "tree", "tree_gqa"} if "gqa" in CONFIGS[name][2] else set())
    if entry.recurrence is not None:
        wanted -= {"tree", "tree_gqa", *RAGGED}
    assert set(entry.variants) - {"canonical"} == wanted
    assert set(entry.parity) == {"capture", "simplify", "pack"} | wanted
    for variant in set(EVEN) & wanted:
        engine = open_engine(Model(tmp_path / "target", entry), variant=variant)
        one_by_one, at_once = (stepped(engine, np.arange(3, 27)[None], width) for width in (1, 24))
        assert np.array_equal(one_by_one, at_once), variant
    scaled, seen = ir.load(packed.graph), observe(packed.graph, packed.truth.tokens)
    loud = {value: rows * np.where(np.arange(rows.shape[1]) % 7, 1, 50) for value, rows in seen.items()}
    assert smooth(scaled, loud, Rounding(None, 1, 1 << 20)) == SCALED[name]
    ir.save(scaled, packed.graph.with_name("smooth.onnx"), external_data="smooth.data")
    assert check_graph(packed.entry, packed.truth, packed.graph.with_name("smooth.onnx"), "smooth", silent) <= 1e-4


def test_a_head_reads_what_its_layers_say(read: tuple[str, Canonical], tmp_path: Path) -> None:
    """The parity of features is among what is checked."""
    captured = copied(read[1], tmp_path / "target")
    truth = captured.truth
    assert truth.features is not None and truth.features.std() > 0.01
    assert simplify_and_pack(captured, silent).entry.features == 64
    off = dataclasses.replace(captured, truth=dataclasses.replace(truth, features=truth.features[:, ::-1]))
    with pytest.raises(ExportError, match="features differ from transformers'"):
        off.checked("pack", tmp_path / "target" / "pack.onnx", silent)


@pytest.mark.slow
def test_tokens_are_dropped_nowhere_within_the_context(tmp_path: Path) -> None:
    """Doge's own code looks whether a cache is longer than its window; a trace asks that once."""
    config = transformers.DogeConfig(**GROUPED | {"num_hidden_layers": 1, "keep_window_size": 64})
    checkpoint = spread("doge", config)
    assert checkpoint.max_context == 64
    entry = build(checkpoint, tmp_path / "target")
    assert all(node.op_type != "TopK" for node in ir.load(tmp_path / "target" / "model.onnx").graph)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 64))
    model = spread("doge", config).model
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens), use_cache=False).logits[0].numpy()
    found = stepped(open_engine(Model(tmp_path / "target", entry)), tokens, 8)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_layers_that_let_through_what_stands_out(tmp_path: Path) -> None:
    """Gemma 3n's first ones, as published: torch's exporter does not take how they find their threshold. The last one
    does not, and reads the keys and values of the first."""
    sparse = {"activation_sparsity_pattern": [0.95, 0.0], "intermediate_size": [128] * 2}
    shared = {"num_hidden_layers": 2, "num_kv_shared_layers": 1, "head_dim": 16, "sliding_window": 8}
    tables = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "laurel_rank": 16}
    kinds = {"layer_types": ["sliding_attention"] * 2}
    checkpoint = spread("gemma3n", transformers.Gemma3nTextConfig(**GROUPED | sparse | shared | tables | kinds))
    with pytest.raises(ExportError, match="Gemma3nForCausalLM: no head can read it: its layers pass on 4 streams"):
        compute_truth(checkpoint, reading_head())
    entry = build(checkpoint, tmp_path / "target")
    assert max(entry.parity.values()) <= 1e-4, entry.parity
    assert "grouped" in entry.variants


def test_attention_that_depends_on_the_cache_s_capacity_is_refused_by_name(tmp_path: Path) -> None:
    local = tiny("gpt_neo", num_layers=1, attention_types=[[["local"], 1]], window_size=256)
    with pytest.raises(ExportError, match=r"GPTNeoForCausalLM, capture: its attention depends on the cache's capacity"):
        build(local, tmp_path / "target")


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("BartConfig", {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64}, "its BartDecoder counts positions"),
        ("RoFormerConfig", BASE | {"is_decoder": True}, "its RoFormerEncoder counts positions"),
        ("RobertaConfig", BASE | {"is_decoder": True, "pad_token_id": 1}, "its positions do not count tokens"),
        ("OpenAIGPTConfig", {"n_embd": 64, "n_layer": 1, "n_head": 4}, "keeps no key-value cache"),
    ],
)
def test_positions_that_a_model_cannot_be_told_are_refused_by_name(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    """Before it is captured, which takes minutes: parity alone would say that its logits differ."""
    checkpoint = spread(kind, getattr(transformers, kind)(**changes))
    with pytest.raises(ExportError, match=reason):
        kept(checkpoint.model)


def dory() -> Checkpoint:
    """A layer before, one that is gone through twice, and one behind."""
    sizes = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "head_dim": 16, "sliding_window": 8}
    return spread("dory", transformers.DoryConfig(**GROUPED | sizes))


def test_a_cache_gets_layers_as_it_goes() -> None:
    """Dory's, one for each time that a layer is gone through again."""
    model = dory().model
    shapes, recurrence = kept(model)
    past = [torch.zeros(1, shape.heads, 64, width) for shape in shapes for width in (shape.key_dim, shape.value_dim)]
    _, layers = graph_layers(model, past, torch.zeros(1, dtype=torch.long), Memory())
    assert len(layers) == len(shapes) == 4 and recurrence is None


@pytest.mark.slow
def test_layers_that_are_gone_through_again(tmp_path: Path) -> None:
    entry = build(dory(), tmp_path / "target")
    assert max(entry.parity.values()) <= 1e-4, entry.parity
    assert "gqa" in entry.variants and len(entry.cache) == 4


def test_positions_that_are_complex_numbers_turn_heads_as_real_ones_do() -> None:
    """DeepSeek V2's; Llama 4's are for heads behind tokens, and stay as they are."""
    model, noise = tiny("deepseek_v2", num_hidden_layers=1).model, torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, heads, 7, 8, generator=noise) for heads in (4, 1))
    places, code = torch.arange(3, 10)[None].expand(2, 7), sys.modules[type(model).__module__]
    theirs = code.apply_rotary_emb, torch.polar
    wanted = code.apply_rotary_emb(query, key, model.model.rotary_emb(query, places))
    with lowered(model):
        turns = model.model.rotary_emb(query, places)
        found = code.apply_rotary_emb(query, key, turns)
    assert not turns.is_complex() and (code.apply_rotary_emb, torch.polar) == theirs
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, atol=1e-6)
    assert not is_complex_turn(modeling_llama4.apply_rotary_emb)


@pytest.mark.parametrize(
    ("kind", "changes", "layer"),
    [
        (
            "DeepseekV32Config",
            LATENT | {"index_head_dim": 16, "index_n_heads": 2},
            "layer 0 keeps a DynamicIndexedLayer",
        ),
        (
            "MiniMaxM3VLTextConfig",
            GROUPED
            | {"head_dim": 16, "index_head_dim": 16, "num_local_experts": 4}
            | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
            "layer 1 keeps a MiniMaxM3VLSparseCacheLayer",
        ),
    ],
    ids=["deepseek_v32", "minimax_m3"],
)
def test_a_cache_with_more_in_it_than_a_graph_s_is_refused_by_name(
    kind: str, changes: dict[str, Any], layer: str
) -> None:
    """Before the first step is taken: until as many tokens are there as are chosen, all are attended to."""
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**changes | {"bos_token_id": 1}))
    with pytest.raises(ExportError, match=rf"ForCausalLM: {layer}, with more in it than keys, values and states"):
        kept(model)


def test_a_graph_that_onnxruntime_cannot_load_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^target: FalconForCausalLM, capture: onnxruntime cannot") as caught:
        build(tiny("falcon", alibi=True, num_hidden_layers=1), tmp_path / "target")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.usefixtures("captures_once")
@pytest.mark.parametrize("context", [2, 6])
def test_rows_are_as_long_as_a_short_context_allows(context: int, tmp_path: Path) -> None:
    short = dataclasses.replace(tiny("gpt2", n_layer=1), max_context=context)
    entry = build(short, tmp_path / "target")
    assert max(entry.parity.values()) <= 1e-4, entry.parity
    assert np.load(tmp_path / "target" / "golden.npz")["tokens"].shape == (3, context)
