"""csd beside processes that compete for the CPUs, with one thread and with all.

    python -m bench busy [--model PATH] [--others 0 1 2] [--rounds 3] [--samples 8] [--tokens 64]
        [--json FILE]

A competing process counts in a loop on one core. For each number of them, each side draws in turn:
csd with one thread, csd with all threads, which chooses the threads of each step
(`csd/engine/step/thread_choice.py`), csd with all threads in every step, and llama.cpp with all
threads if llama-cpp-python is installed. Rates are medians over the rounds. The goal is at least
0.8 of the rate of one thread. vLLM has an environment of its own and is not timed here.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import csd
from bench.lib.common import finish, table
from bench.lib.models import HELP, path_of
from bench.lib.settings import PLAIN
from csd.engine.step import thread_choice
from csd.models.load import load

RESULT = Path("bench/results/busy.json")
PROMPT = (
    "A baker makes 6 trays of rolls with 12 rolls on each tray. She sells 48 rolls in the morning "
    "and half of what is left in the afternoon. How many rolls are left? Work it out step by step."
)
GOAL = 0.8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=HELP)
    parser.add_argument("--others", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    threads, load = torch.get_num_threads(), os.getloadavg()[0]
    if threads == 1:
        raise SystemExit("busy compares one thread with several: set OMP_NUM_THREADS to 2 or more")
    sides = sides_of(path_of(args.model), threads, args.samples, args.tokens)
    # compiles, and times steps while nothing of this benchmark competes
    for draw in sides.values():
        draw(0)
    rows = []
    for others in args.others:
        with competing(others):
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for seed in range(1, args.rounds + 1):
                for name, draw in sides.items():
                    rates[name].append(draw(seed))
        rows.append(row_of(others, rates))
        print(table([rows[-1]]), flush=True)
    result = {"bench": "busy", "threads": threads, "goal": GOAL, "load": load, "rows": rows}
    finish(result, args.json)


def row_of(others: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Median tokens per second of each side, and csd's median ratio to one thread per round."""
    one = rates["csd, 1 thread"]
    ratios = [a / b for a, b in zip(rates["csd"], one, strict=True)]
    return {
        "others": others,
        **{name: round(median(values), 1) for name, values in rates.items()},
        "csd / 1 thread": round(median(ratios), 2),
        "lowest": round(min(ratios), 2),
    }


def sides_of(
    model: str, threads: int, samples: int, tokens: int
) -> dict[str, Callable[[int], float]]:
    """Functions that draw with a seed and return tokens per second, by name."""
    loaded = load(model, device="cpu")
    recent = thread_choice.RECENT
    engines = {name: csd.Engine(loaded) for name in ("csd, 1 thread", "csd", "csd, fixed threads")}

    def drawer(name: str) -> Callable[[int], float]:
        engine = engines[name]
        number = 1 if name == "csd, 1 thread" else threads

        def draw(seed: int) -> float:
            torch.set_num_threads(number)
            # without a trial it keeps all threads
            thread_choice.RECENT = 10**9 if name == "csd, fixed threads" else recent
            start = time.perf_counter()
            out = engine.generate(
                [{"role": "user", "content": PROMPT}],
                num_samples=samples,
                max_new_tokens=tokens,
                seed=seed,
                **PLAIN,
                ignore_eos=True,
                progress=False,
            )
            return out.stats.tokens / (time.perf_counter() - start)

        return draw

    sides = {name: drawer(name) for name in engines}
    if importlib.util.find_spec("llama_cpp") is not None and model.endswith(".gguf"):
        sides["llama.cpp"] = llama(model, loaded.tokenizer, samples, tokens)
    return sides


def llama(model: str, tokenizer: Any, samples: int, tokens: int) -> Callable[[int], float]:
    """llama.cpp's batched sampling of the same prompt."""
    from bench.e2e.long.sides import Llama

    side = Llama(model, samples, (tokens + 128) * samples)
    prompt = tokenizer(PROMPT)["input_ids"]
    return lambda seed: side.draw(prompt, samples, tokens, seed).rate


@contextmanager
def competing(count: int) -> Iterator[None]:
    """Context in which `count` processes run an empty loop."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
