"""Leadout itself, in the environment that runs the benchmark: ``auto``, the draft model alone, and plain decoding.

Plain is the fastest there is: width 1, exactness off. The draft is exported as `leadout export` does by default.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from protocol import Answer, Job, Request, complete, run

DRAFTS = {"auto": "auto", "model": "model", "plain": "none"}


def prepare(job: Job) -> None:
    from leadout.export.build import export_pair

    export_pair(job["target"], job["draft"], Path(job["models"]) / "bundle", precision=job["precision"])


def load(job: Job) -> Callable[[Request], Answer]:
    import leadout
    from leadout.runtime.divergence import first_divergence

    draft = DRAFTS[job["mode"]]
    pair = leadout.load(Path(job["models"]) / "bundle", threads=job["threads"], exact=draft != "none")

    def answer(request: Request) -> Answer:
        if "compare" in request:
            parted = first_divergence(pair, request["prompt_ids"], *request["compare"])
            return {} if parted is None else {"margin": parted.margin, "near_tie": parted.near_tie}
        settings = {"max_new_tokens": request["max_new_tokens"], "temperature": request["temperature"]}
        begin = perf_counter()
        result = pair.generate(request["prompt_ids"], draft=draft, ignore_eos=True, **settings)
        seconds = perf_counter() - begin
        if request.get("warm_up"):
            pair.forget()  # no drafter may know an answer from it
        return complete(result.token_ids, seconds, result.stats.seconds["prefill"], 0)

    return answer


if __name__ == "__main__":
    run(prepare, load, ["leadout", "onnxruntime", "numpy"])
