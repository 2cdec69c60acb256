"""llama.cpp through llama-cpp-python: plain, and prompt lookup, the only speculation its package offers.

The GGUF files are written here, with llama.cpp's own names and its order of rotary dimensions; int8 is Q8_0, int4 Q4_0.
Matrices are quantised, norms are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from protocol import Answer, Job, Request, complete, run

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def prepare(job: Job) -> None:
    """Write ``target.gguf``. Raises ValueError for a checkpoint that is not a plain Llama."""
    import gguf
    from safetensors.torch import load_file

    source = Path(job["target"])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"the GGUF writer knows 'llama' only, not '{config['model_type']}'")
    writer = gguf.GGUFWriter(Path(job["models"]) / "target.gguf", "llama")
    describe(writer, config)
    vocabulary(writer, json.loads((source / "tokenizer.json").read_text(encoding="utf-8")), config)
    kind = gguf.GGMLQuantizationType[{"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}[job["precision"]]]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float().numpy()
        for part, count in heads.items():
            if f"{part}." in name:  # halves side by side become pairs
                weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        stored = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(renamed(name), gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renamed(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem, suffix = name.rsplit(".", 1)
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{suffix}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{LAYER[part]}.{suffix}"


def describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """The file needs one, though prompts come as ids: byte-level BPE, padded to the size of the embeddings."""
    import gguf

    ids = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = [special.get(i, ids.get(i, f"<unused {i}>")) for i in range(config["vocab_size"])]
    kinds = [
        gguf.TokenType.NORMAL if i in ids and i not in special else gguf.TokenType.CONTROL for i in range(len(texts))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])


def load(job: Job) -> Callable[[Request], Answer]:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter = LlamaPromptLookupDecoding(num_pred_tokens=2) if job["mode"] == "lookup" else None  # 2: "for cpu-only"
    llama = llama_cpp.Llama(
        str(Path(job["models"]) / "target.gguf"),
        n_ctx=0,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=drafter,
        logits_all=drafter is not None,  # its prompt lookup reads the logits of every draft
        verbose=False,
    )

    def answer(request: Request) -> Answer:
        llama.set_seed(request["seed"])
        tokens: list[int] = []
        first = 0.0
        begin = perf_counter()
        for token in llama.generate(request["prompt_ids"], top_k=0, top_p=1.0, min_p=0.0, temp=request["temperature"]):
            first = first or perf_counter() - begin
            tokens.append(token)
            if len(tokens) == request["max_new_tokens"]:
                break
        return complete(tokens, perf_counter() - begin, first, 1)

    return answer


if __name__ == "__main__":
    run(prepare, load, ["llama-cpp-python"])
