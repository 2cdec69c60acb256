"""transformers: plain `generate`, assisted by the draft model with its default heuristics, and by prompt lookup."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from protocol import Answer, Job, Request, complete, run


def prepare(job: Job) -> None:
    """Nothing: it reads the checkpoints themselves."""


class Clock:
    """A streamer that only notes when the first tokens after the prompt came, and how many they were."""

    def __init__(self) -> None:
        self.puts = 0
        self.first = 0.0
        self.tokens = 0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first is the prompt
            self.first, self.tokens = perf_counter(), int(value.numel())

    def end(self) -> None:
        """Required by its interface."""


def load(job: Job) -> Callable[[Request], Answer]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    target, draft = (
        AutoModelForCausalLM.from_pretrained(job[role], dtype=torch.float32) for role in ("target", "draft")
    )
    for model in (target, draft):
        model.generation_config.eos_token_id = None  # end of text does not end an answer
    extra = {"plain": {}, "draft": {"assistant_model": draft}, "lookup": {"prompt_lookup_num_tokens": 5}}[job["mode"]]

    def answer(request: Request) -> Answer:
        torch.manual_seed(request["seed"])
        prompt = torch.tensor([request["prompt_ids"]])
        options: dict[str, Any] = {"max_new_tokens": request["max_new_tokens"], "do_sample": request["temperature"] > 0}
        if options["do_sample"]:
            options |= {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        clock = Clock()
        begin = perf_counter()
        with torch.inference_mode():
            output = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, streamer=clock, **options, **extra
            )
        seconds = perf_counter() - begin
        return complete(output[0, prompt.shape[1] :].tolist(), seconds, clock.first - begin, clock.tokens)

    return answer


if __name__ == "__main__":
    run(prepare, load, ["transformers", "torch"])
