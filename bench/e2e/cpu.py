"""csd on CPU: with speculation, without, `transformers` generate and llama.cpp, alternated.

    python -m bench.cpu [MODEL] [--tasks words code] [--samples 1 4 8 16] [--nodes auto 8]
        [--pairs 9] [--llama] [--json FILE]

SmolLM2-135M-Instruct when no model is given, or a name of `python -m bench models`; all sides run
in `--dtype`, by default the one that csd selects on this machine. The prompts are our own word
problems and code tasks, with the settings of the model's generation config (at temperature 0.7
without filters if it sets none), and with at most `--tokens` new tokens per sample. `--exact on
off` runs csd with exact=True and False; by default the engine chooses. Each pair draws the same
samples with csd with and without speculation, in alternating order; then `transformers` draws as
many in one batch, and with `--llama` llama.cpp does (`pip install llama-cpp-python`; needs a GGUF
file). `--nodes` lists numbers of drafted tokens per step, with one row for each. The report has
medians over the pairs and the median of the paired ratios with its bootstrap interval.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import csd
from bench.lib.common import bootstrap, drafting, finish, table
from bench.lib.llama_cpp import LlamaCpp, copy_in
from bench.lib.models import HELP, ids_of, path_of
from bench.lib.settings import of_transformers, settings_of, words

PROBLEMS = [
    "A baker makes 6 trays of rolls with 12 rolls on each tray. She sells 48 rolls in the morning "
    "and half of what is left in the afternoon. How many rolls are left?",
    "Tom walks 3 km to school and 3 km back, five days a week. How far does he walk in 4 weeks?",
    "A box holds 24 pens. A school buys 15 boxes and gives 9 pens to each of 30 children. How many "
    "pens remain?",
    "Lena saves 4 dollars a week. After 10 weeks she buys a book for 13 dollars and a lamp for 18 "
    "dollars. How much money does she have left?",
    "A train travels 80 km in the first hour and 20 km more in each following hour than in the one "
    "before. How far does it go in 4 hours?",
    "There are 5 shelves with 18 books each. A third of the books are lent out. How many stay?",
    "A farmer has 14 cows and twice as many sheep. Each sheep gives 3 kg of wool. How much wool is "
    "that?",
    "A pool fills at 12 litres a minute and loses 2 litres a minute. How long does it take to hold "
    "450 litres?",
    "Mia reads 25 pages a day. Her book has 340 pages and she has read 90. How many days until she "
    "has finished?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=HELP)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["words"])
    parser.add_argument("--exact", nargs="+", choices=("on", "off"))
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--nodes", nargs="+", default=["auto"], help="drafts of a step, or auto")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--llama", action="store_true", help="llama.cpp too")
    parser.add_argument("--json")
    args = parser.parse_args()

    path = path_of(args.model)
    dtype = args.dtype and getattr(torch, args.dtype)
    choices = [{"on": True, "off": False}[x] for x in args.exact] if args.exact else [None]
    engines = [csd.Engine(path, dtype=dtype, device="cpu", exact=exact) for exact in choices]
    settings = settings_of(engines[0].generation_config)
    others = {"transformers": Transformers(path, engines[0].dtype, settings)}
    if args.llama:
        with tempfile.TemporaryDirectory() as folder:
            same = copy_in(path, engines[0].dtype, Path(folder, "model.gguf"))
            others["llama.cpp"] = LlamaCpp(same, max(args.samples), settings=settings)
    warm = ids_of(engines[0].tokenizer, PROBLEMS[0])
    for engine in engines:
        csd.generate(engine, warm, num_samples=2, max_new_tokens=8, seed=0)
    for other in others.values():
        other.draw(warm, 2 if max(args.samples) > 1 else 1, 4, seed=0)
    rows = []
    for task in args.tasks:
        for n in args.samples:
            for engine in engines:
                prompts, sizes = TASKS[task](), (n, args.nodes, args.pairs, args.tokens)
                measured = measure(engine, others, prompts, *sizes, settings)
                rows += [{"task": task, "exact": engine.exact} | row for row in measured]
                print(table(rows[-len(measured) :]), flush=True)
    print(table(rows))
    print(words(settings))
    head = {"model": Path(path).name, "settings": settings, "dtype": str(engines[0].dtype)}
    finish({"bench": "cpu", **head, "rows": rows}, args.json)


def code() -> list[str]:
    lines = (Path(__file__).parents[1] / "prompts/code.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


TASKS = {"words": lambda: PROBLEMS, "code": code}


def measure(
    engine,
    others: dict,
    prompts: list[str],
    n: int,
    nodes: list[str],
    pairs: int,
    tokens: int,
    settings: dict,
) -> list[dict]:
    """Tokens per second of all sides for n samples, one row for each of `nodes`."""
    rates = {name: [] for name in (*nodes, "plain", *others)}
    taus, equal = {name: [] for name in nodes}, dict.fromkeys(nodes, 0)
    for i in range(pairs):
        prompt = ids_of(engine.tokenizer, prompts[i % len(prompts)])
        sides, outs = [*nodes, "plain"], {}
        for name in sides if i % 2 else sides[::-1]:
            start = time.perf_counter()
            outs[name] = csd.generate(
                engine,
                prompt,
                num_samples=n,
                max_new_tokens=tokens,
                seed=i,
                **settings,
                **drafting("none" if name == "plain" else name),
            )
            rates[name].append(outs[name].stats.tokens / (time.perf_counter() - start))
        for name in nodes:
            taus[name].append(outs[name].stats.tokens_per_step)
            both = zip(outs[name].tokens, outs["plain"].tokens, strict=True)
            equal[name] += sum(a == b for a, b in both)
        for name, other in others.items():
            rates[name].append(other.draw(prompt, n, tokens, seed=i))

    speeds = {name: statistics.median(runs) for name, runs in rates.items()}

    def row(name: str) -> dict:
        def over(other: str) -> list[float]:
            return [a / b for a, b in zip(rates[name], rates[other], strict=True)]

        low, high = bootstrap(over("plain"))
        return {
            "samples": n,
            "nodes": name,
            "csd tok/s": speeds[name],
            **{f"{other} tok/s": speeds[other] for other in ("plain", *others)},
            "tau": statistics.median(taus[name]),
            "csd/plain": statistics.median(over("plain")),
            "low": low,
            "high": high,
            **{f"csd/{other}": statistics.median(over(other)) for other in others},
            "equal samples": f"{equal[name]}/{n * pairs}",
        }

    return [row(name) for name in nodes]


class Transformers:
    """`generate` of transformers on the same file or folder, with one batch of n rows."""

    def __init__(self, path: str, dtype: torch.dtype, settings: dict):
        self.model, self.settings = module(path, dtype), settings

    def draw(self, prompt: list[int], n: int, tokens: int, seed: int) -> float:
        """Returns tokens per second; tokens after a row's end token do not count."""
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=n,
            max_new_tokens=tokens,
            do_sample=True,
            **of_transformers(self.settings),
        )
        seconds = time.perf_counter() - start
        new = out[:, len(prompt) :]
        ends = torch.tensor(self.model.generation_config.eos_token_id).view(-1)
        is_end = torch.isin(new, ends).int()
        return int(((is_end.cumsum(1) - is_end) == 0).sum()) / seconds


def module(model: str, dtype: torch.dtype):
    """Load the model with transformers."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path, options = Path(model), {}
    if path.suffix == ".gguf":
        options = dict(gguf_file=path.name, quantization_config=GgufConfig(dequantize=True))
        model = str(path.parent)
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options)


if __name__ == "__main__":
    main()
