r"""A GGUF file's own blocks against bfloat16 and llama.cpp: a step, a prompt, a start, the error.

    python -m bench packed [MODEL] [--rows 1 2 4 8 16 32] [--prompts 256 1024 2048] [--pairs 7]
        [--tokens 24] [--threads 2] [--json F]
    python -m bench packed [MODEL] --quality [--tokens 256] [--json F]

The first form: milliseconds of a step by the number of samples, in plain decoding (no drafts, no
shared rows), tokens of a prompt read per second, and seconds and memory from a cold start to the
first token, each start in a process of its own. Within a pair all sides run in turn, in the
opposite order in every other pair; a figure is the median of the pairs, "x csd" the median of the
pairs' ratios to csd with the file's blocks, with its range. llama.cpp has one cache for all
sequences, in which they share the prompt.

--quality: KL divergence from the float32 forward pass of the file's numbers, of texts of this
repository and of Python's modules. It needs 4 bytes of disk for each token and word of the
vocabulary. MODEL: a name of `python -m bench models`, or a GGUF file.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

import csd
from bench.e2e.packed import quality
from bench.lib.common import finish, table
from bench.lib.models import HELP, ids_of, path_of

PACKED, BFLOAT16, LLAMA = "csd", "csd, bfloat16", "llama.cpp"
QUESTION = "Write a Python function that checks whether a word is a palindrome, with tests."
# steps of a call that are left out of its median
WARM = 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=HELP)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024, 2048])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="of a sample (24), or of a text (256)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--without", nargs="+", choices=[BFLOAT16, LLAMA], default=[])
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: llama-cpp-python is not installed", file=sys.stderr)
        args.without = [*args.without, LLAMA]
    if args.threads:
        torch.set_num_threads(args.threads)
    path = path_of(args.model)
    head = {"bench": "packed", "model": Path(path).name, "threads": torch.get_num_threads()}
    if args.quality:
        ways = ["packed", "bfloat16", quality.LLAMA_CPP]
        ways = [way for way in ways if way != quality.LLAMA_CPP or LLAMA not in args.without]
        rows = quality.measure(path, args.tokens or 256, ways)
        print(table(rows))
        finish(head | {"quality": rows}, args.json)
        return
    wanted = [side for side in (PACKED, BFLOAT16, LLAMA) if side not in args.without]
    starts = [_start(side, path, args.pairs) for side in wanted]
    print(table(starts), flush=True)
    sides = _sides(path, args.rows, args.prompts, args.tokens or 24, args.without)
    steps = [_row("samples", n, sides, n, args) for n in args.rows]
    prompts = [_row("prompt", n, sides, n, args) for n in args.prompts]
    print(table(steps), table(prompts), sep="\n")
    finish(head | {"starts": starts, "steps": steps, "prompts": prompts}, args.json)


class Csd:
    """An engine of the file, with a fixed way to hold its weights."""

    def __init__(self, path: str, slots: int, dtype: torch.dtype | None):
        self.engine = csd.Engine(path, max_slots=slots, dtype=dtype, share_rows=False)

    def step(self, ids: list[int], n: int, tokens: int, seed: int) -> float:
        """Milliseconds of a step of n samples."""
        times: list[float] = []

        def note(prompt: int, sample: int, *_: object) -> None:
            if sample == 0:
                times.append(time.perf_counter())

        csd.generate(
            self.engine,
            ids,
            num_samples=n,
            max_new_tokens=tokens,
            temperature=1.0,
            seed=seed,
            ignore_eos=True,
            speculate=False,
            callback=note,
        )
        return _median_step(times)

    def read(self, ids: list[int]) -> float:
        start = time.perf_counter()
        csd.generate(self.engine, ids, num_samples=1, max_new_tokens=1, seed=0)
        return len(ids) / (time.perf_counter() - start)


class Llama:
    """llama.cpp on the same file."""

    def __init__(self, path: str, slots: int, cells: int):
        from bench.lib.llama_cpp import LlamaCpp

        self.lib = LlamaCpp(path, slots, cells)

    def step(self, ids: list[int], n: int, tokens: int, seed: int) -> float:
        times: list[float] = []
        self.lib.samples(ids, n, tokens, seed, times)
        return _median_step(times)

    def read(self, ids: list[int]) -> float:
        start = time.perf_counter()
        self.lib.samples(ids, 1, 1, 0)
        return len(ids) / (time.perf_counter() - start)


def _median_step(times: list[float]) -> float:
    return 1e3 * statistics.median(b - a for a, b in list(pairwise(times))[WARM:])


def _sides(path: str, rows: list[int], prompts: list[int], tokens: int, without: list) -> dict:
    slots = max(rows, default=1)
    sides: dict = {PACKED: Csd(path, slots, None)}
    if BFLOAT16 not in without:
        sides[BFLOAT16] = Csd(path, slots, torch.bfloat16)
    if LLAMA not in without:
        cells = max(slots * tokens + 512, max(prompts, default=0) + 64)
        sides[LLAMA] = Llama(path, slots, cells)
    return sides


def _row(kind: str, n: int, sides: dict, number: int, args: argparse.Namespace) -> dict:
    """A row of figures: of steps with n samples, or of prompts of n tokens."""
    first = next(iter(sides.values()))
    ids = ids_of(first.engine.tokenizer, QUESTION)
    tokens = args.tokens or 24
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(-1, args.pairs):
        order = list(sides) if pair % 2 else list(sides)[::-1]
        for name in order:
            if kind == "samples":
                figure = sides[name].step(ids, n, tokens, pair + 2)
            else:
                figure = sides[name].read(_random_ids(n, pair))
            # the first round warms up
            if pair >= 0:
                figures[name].append(figure)
    row: dict = {kind: number}
    for name, values in figures.items():
        row[name] = statistics.median(values)
        if name != PACKED:
            pairs = zip(values, figures[PACKED], strict=True)
            ratios = [a / b if kind == "samples" else b / a for a, b in pairs]
            row[f"{name} / csd"] = statistics.median(ratios)
            row[f"range of {name}"] = [round(x, 3) for x in (min(ratios), max(ratios))]
    print(row, flush=True)
    return row


def _random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(count + 7919 * (seed + 2))
    return torch.randint(1000, 20000, (count,), generator=generator).tolist()


# prints seconds to the first token, and the peak of resident memory above that of the imports
START = {
    PACKED: "import csd; made = lambda p: csd.Engine(p, max_slots=1); tokens = lambda m: "
    "csd.generate(m, 'The sky is', num_samples=1, max_new_tokens=1, seed=0)",
    LLAMA: "from llama_cpp import Llama; made = lambda p: Llama(p, n_ctx=512, verbose=False); "
    "tokens = lambda m: m('The sky is', max_tokens=1)",
}
START[BFLOAT16] = START[PACKED].replace("max_slots=1", "max_slots=1, dtype='bfloat16'")
MEASURED = """
import resource, sys, time
start = time.perf_counter()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
{code}
imported, base = time.perf_counter(), peak()
tokens(made(sys.argv[1]))
end = time.perf_counter()
print(end - start, imported - start, peak(), base)
"""


def _start(side: str, path: str, pairs: int) -> dict:
    """A cold start: a process that imports, loads the file and draws a token, with cached loops."""
    command = [sys.executable, "-c", MEASURED.format(code=START[side]), path]
    runs = []
    for _ in range(min(pairs, 3) + 1):
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        runs.append([float(x) for x in out.split()[-4:]])
    medians = [statistics.median(x) for x in zip(*runs[1:], strict=True)]
    names = "seconds to a token", "of these importing", "peak GB", "GB of the imports"
    return {"side": side, **dict(zip(names, medians, strict=True))}


if __name__ == "__main__":
    main()
