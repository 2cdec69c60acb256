"""OpenVINO GenAI: plain, a draft model with fixed and dynamic length, prompt lookup.

`optimum-cli export openvino` writes the models. fp32 is made to compute in fp32, cache included (its default on some
processors is bf16); int8 is its 8-bit weights, int4 its 4-bit ones in groups of 32, and otherwise its own defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from protocol import Answer, Job, Request, call, complete, run

LENGTHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"num_assistant_tokens": 5},
    "draft-dynamic": {"assistant_confidence_threshold": 0.4},
    "lookup": {"num_assistant_tokens": 5, "max_ngram_size": 3},
}
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def prepare(job: Job) -> None:
    for role, precision in (("target", job["precision"]), ("draft", job["draft_precision"])):
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", job[role]]
        command += ["--task", "text-generation-with-past", "--weight-format", precision]
        command += ["--group-size", "32"] if precision == "int4" else []  # its 128 do not divide every width
        call([*command, str(Path(job["models"]) / role)])


def load(job: Job) -> Callable[[Request], Answer]:
    import numpy as np
    import openvino
    import openvino_genai as genai

    models, mode = Path(job["models"]), job["mode"]
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["threads"]}
    options |= EXACT if job["precision"] == "fp32" else {}
    extra: dict[str, Any] = {"prompt_lookup": True} if mode == "lookup" else {}
    if mode.startswith("draft"):
        extra["draft_model"] = genai.draft_model(str(models / "draft"), "CPU", **options)
    pipeline = genai.LLMPipeline(str(models / "target"), "CPU", **options, **extra)

    def answer(request: Request) -> Answer:
        config = genai.GenerationConfig(max_new_tokens=request["max_new_tokens"], ignore_eos=True, **LENGTHS[mode])
        if request["temperature"] > 0:
            config.do_sample, config.temperature, config.top_p = True, request["temperature"], 1.0
            config.rng_seed = request["seed"]
        ids = np.array([request["prompt_ids"]], np.int64)
        prompt = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        begin = perf_counter()
        result = pipeline.generate(prompt, config)
        seconds = perf_counter() - begin
        raw = result.perf_metrics.raw_metrics
        first = result.perf_metrics.get_ttft().mean / 1e3
        return complete(result.tokens[0], seconds, first, raw.m_batch_sizes[0])

    return answer


if __name__ == "__main__":
    run(prepare, load, ["openvino-genai", "openvino", "optimum-intel", "nncf", "transformers"])
