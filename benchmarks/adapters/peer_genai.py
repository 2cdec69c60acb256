"""onnxruntime-genai: plain, a draft model with fixed and adaptive length, n-gram lookup.

Its own builder writes the models (int8, int4: block-wise weights with 8-bit activations, its default). Speculation is
what its configuration calls ``speculative``, over the same two folders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from protocol import Answer, Job, Request, call, complete, run

SPECULATION: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"max_draft_tokens": 4},
    "draft-adaptive": {"max_draft_tokens": 8, "min_adaptive_k": 1, "cooldown": True},
    "ngram": {"ngram_size": 3, "max_draft_tokens": 4},
}


def prepare(job: Job) -> None:
    for role, precision in (("target", job["precision"]), ("draft", job["draft_precision"])):
        build(job[role], Path(job["models"]) / role, precision)


def build(checkpoint: str | Path, folder: Path, precision: str) -> None:
    """Run its model builder on a checkpoint directory."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(folder)]
    call([*command, "-p", precision, "-e", "cpu"])


def overlay(models: Path, mode: str, threads: int) -> dict[str, Any]:
    """What is laid over the target's configuration. The draft's session gets one thread: with two its threads and the
    target's are in each other's way, and it is half as fast."""
    options = {"decoder": {"session_options": {"intra_op_num_threads": threads}}}
    if mode.startswith("draft"):
        draft = json.loads((models / "draft" / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        draft["filename"] = f"../draft/{draft['filename']}"
        draft["session_options"]["intra_op_num_threads"] = 1
        options["draft"] = draft
    return {"model": options} | ({"speculative": SPECULATION[mode]} if SPECULATION[mode] else {})


def load(job: Job) -> Callable[[Request], Answer]:
    import onnxruntime_genai as genai

    models = Path(job["models"])
    config = genai.Config(str(models / "target"))
    config.overlay(json.dumps(overlay(models, job["mode"], job["threads"])))
    model = genai.Model(config)

    def answer(request: Request) -> Answer:
        prompt, sampled = request["prompt_ids"], request["temperature"] > 0
        length = len(prompt) + request["max_new_tokens"]
        options = {"min_length": length, "max_length": length, "do_sample": sampled, "random_seed": request["seed"]}
        if sampled:
            options |= {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        begin = perf_counter()
        settings = genai.GeneratorParams(model)
        settings.set_search_options(**options)
        generator = genai.Generator(model, settings)
        generator.append_tokens(prompt)
        first = perf_counter() - begin
        while not generator.is_done():
            generator.generate_next_token()
        seconds = perf_counter() - begin
        return complete(generator.get_sequence(0)[len(prompt) :], seconds, first, 0)

    return answer


if __name__ == "__main__":
    run(prepare, load, ["onnxruntime-genai", "onnxruntime"])
