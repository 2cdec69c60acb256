"""Plain decoding of one checkpoint, Leadout's engine against onnxruntime-genai's: fp32, one token a step, one run.

    python benchmarks/plain_decode.py models/target
    python benchmarks/plain_decode.py CHECKPOINT --threads 2 --prompt 32 --tokens 128 --rounds 9 --json result.json

Both get the same prompt and take the likeliest token at each step. Each runs in a process of its own that measures
on command, so that rounds alternate; the first round is dropped. onnxruntime-genai builds its graph with its own
builder and keeps its own session options except the number of threads. It is installed beside this file on first use
(``--genai DIR`` puts it elsewhere), where it shares the onnxruntime, torch and transformers that are here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from adapters.table import GENAI
from programs import at_least_one, keep, result_file, run

from leadout.errors import LeadoutError

NAMES = ("leadout", "genai")
PAUSE = 0.2  # seconds before each round: the other's threads, which have just worked, spin on for a while


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--prompt", type=at_least_one, default=32, help="tokens before the first one that is timed")
    parser.add_argument("--tokens", type=at_least_one, default=128, help="tokens timed in a round")
    parser.add_argument("--rounds", type=at_least_one, default=9)
    parser.add_argument("--genai", type=Path, default=Path(__file__).parent / ".genai", help="where it is installed")
    parser.add_argument("--models", type=Path, help="keep both exports here and use them again")
    parser.add_argument("--json", type=result_file, help="write the result to this file")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve({"leadout": leadout_decoder, "genai": genai_decoder}[options.worker](options))
        return
    install(options.genai)
    with tempfile.TemporaryDirectory() as scratch:
        options.models = options.models or Path(scratch)
        export(options)
        result = measure(options)
    print(json.dumps(result, indent=1))
    keep(options.json, result)


def install(folder: Path) -> None:
    """Put onnxruntime-genai alone into ``folder``: it must not bring another onnxruntime or torch."""
    if not (folder / "onnxruntime_genai").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), GENAI]
        subprocess.run(pip, check=True)


def export(options: argparse.Namespace) -> None:
    """Write ``leadout/`` and ``genai/`` under options.models, unless they are there."""
    if not (options.models / "leadout").exists():
        from leadout.export.build import export_pair

        export_pair(options.checkpoint, None, options.models / "leadout", progress=lambda line: None)
    target = options.models / "genai"
    if not target.exists():
        build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(options.checkpoint)]
        build += ["-o", str(target), "-p", "fp32", "-e", "cpu"]
        subprocess.run(
            build, check=True, env=environment(options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    config = json.loads((target / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = options.threads
    (target / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Alternate the two workers; seconds of each round, tokens per second by median, and their ratio."""
    workers = {name: start(name, options) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(options.rounds + 1):
        for name in NAMES if turn % 2 else reversed(NAMES):
            time.sleep(PAUSE)
            took = command(workers[name])
            if turn:
                seconds[name].append(took)
    for worker in workers.values():
        worker.communicate()
    speed = {name: options.tokens / statistics.median(values) for name, values in seconds.items()}
    return {
        "checkpoint": options.checkpoint.name,
        "threads": options.threads,
        "tokens": options.tokens,
        "tokens_per_second": speed,
        "ratio": speed["leadout"] / speed["genai"],
        "seconds": seconds,
    }


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    values = {k: getattr(options, k) for k in ("threads", "prompt", "tokens", "models")}
    arguments = [f"--{key}={value}" for key, value in values.items()]
    line = [sys.executable, __file__, str(options.checkpoint), "--worker", name, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, env=environment(options), stdin=pipe, stdout=pipe, text=True)


def command(worker: subprocess.Popen[str]) -> float:
    """Ask for one round. Raises LeadoutError if the worker died (its own error is on stderr)."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("round\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise LeadoutError(f"a worker ended early: {' '.join(map(str, worker.args))}")  # type: ignore[arg-type]
    return float(answer)


def environment(options: argparse.Namespace) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(options.genai.resolve()), "HF_HUB_OFFLINE": "1"}


def serve(decode: Callable[[], float]) -> None:
    for _ in sys.stdin:
        print(decode(), flush=True)


def prompt(options: argparse.Namespace) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    vocab = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return np.random.default_rng(0).integers(3, vocab, (1, options.prompt))


def leadout_decoder(options: argparse.Namespace) -> Callable[[], float]:
    from leadout.bundle import Bundle
    from leadout.engines import open_engine

    engine = open_engine(Bundle.read(options.models / "leadout").model("target"), threads=options.threads)
    start_ids = prompt(options)
    engine.reserve(options.prompt + options.tokens + 1)

    def decode() -> float:
        past, token = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
        last = np.array([[options.prompt - 1]])
        token[0, 0] = engine.forward(start_ids, past, last)[0, 0].argmax()
        past[0] = options.prompt
        begin = time.perf_counter()
        for _ in range(options.tokens):
            token[0, 0] = engine.forward(token, past)[0, 0].argmax()
            past += 1
        return time.perf_counter() - begin

    return decode


def genai_decoder(options: argparse.Namespace) -> Callable[[], float]:
    import onnxruntime_genai as genai

    model = genai.Model(str(options.models / "genai"))
    start_ids = prompt(options)

    def decode() -> float:
        settings = genai.GeneratorParams(model)
        length = options.prompt + options.tokens + 2
        settings.set_search_options(max_length=length, min_length=length, do_sample=False)  # no end of text before
        generator = genai.Generator(model, settings)
        generator.append_tokens(start_ids.astype(np.int32))
        generator.generate_next_token()  # drawn from the prompt's logits: no step yet
        begin = time.perf_counter()
        for _ in range(options.tokens):
            generator.generate_next_token()
        took = time.perf_counter() - begin
        assert len(generator.get_sequence(0)) == options.prompt + options.tokens + 1
        return took

    return decode


if __name__ == "__main__":
    run(main)
