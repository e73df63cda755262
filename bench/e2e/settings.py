"""Tokens per second with a model's own settings over those with its temperature alone.

    python -m bench settings [MODEL] [--of NAME] [--temperature T] [--samples 1 8 16] [--pairs 7]
        [--tokens 80] [--vllm .venv-vllm/bin/python] [--json F]

The own settings are those of the model's generation config, or with --of those of a model of
`python -m bench models`, such as Qwen's three for SmolLM2-135M, which comes with none.
--temperature replaces the temperature of both: at 1.5 a row without filters is flat. csd draws
with drafts and without, and with --vllm vLLM's CPU build does, plain and with n-grams. Within a
pair, both settings and all sides draw samples of --tokens tokens of one word problem in turn, in
the opposite order in every other pair. "own / plain" is the median of the pairs' ratios with its
bootstrap interval. "csd / it" compares the faster of csd's sides to this side, both with the own
settings. With own settings drafts are accepted more often, so the sides without drafts show what
the settings cost.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import csd
from bench.e2e.cpu import PROBLEMS
from bench.e2e.long.plan import CSD
from bench.e2e.long.vllm_side import Vllm, open_sides
from bench.lib.common import finish, ratio, table
from bench.lib.models import HELP, MODELS, ids_of, path_of
from bench.lib.settings import DEFAULTS, settings_of, words
from csd.models.load import load

# (prompt, samples, tokens of each, seed, settings) -> tokens per second, and per step or None
Draw = Callable[[list[int], int, int, int, dict], tuple[float, float | None]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=HELP)
    parser.add_argument("--of", choices=MODELS, help="take the settings of this model")
    parser.add_argument("--temperature", type=float, help="in place of the settings' own")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    path = path_of(args.model)
    loaded = load(path, device="cpu")
    own = settings_of(loaded.current_generation_config())
    if args.of:
        own = DEFAULTS | {k: v for k, v in MODELS[args.of].settings.items() if k in DEFAULTS}
    if args.temperature is not None:
        own |= {"temperature": args.temperature}
    plain = DEFAULTS | {"temperature": own["temperature"]}
    if own == plain:
        parser.error(f"{Path(path).name} comes without settings: name others with --of")
    head = {"bench": "settings", "model": Path(path).name, "own": own, "plain": plain}
    head |= {"dtype": str(loaded.dtype).removeprefix("torch."), "tokens": args.tokens}
    prompts = [ids_of(loaded.tokenizer, text) for text in PROBLEMS]
    with csd.Engine(loaded) as engine, ExitStack() as stack:
        sides = {name: _csd(engine, name == CSD[0]) for name in CSD}
        if args.vllm:
            length = max(map(len, prompts)) + args.tokens + 64
            peers = open_sides(args.vllm, path, loaded, length, max(args.samples), set(), stack)
            sides |= {name: _vllm(side) for name, side in peers.items()}
        rows = []
        for n in args.samples:
            rows += measure(sides, prompts, n, args.tokens, args.pairs, own, plain)
            print(table(rows[-len(sides) :]), flush=True)
    print(f"own: {words(own)}; plain: {words(plain)}", table(rows), sep="\n")
    finish(head | {"rows": rows}, args.json)


def _csd(engine: csd.Engine, speculate: bool) -> Draw:
    def draw(ids: list[int], n: int, tokens: int, seed: int, settings: dict) -> tuple:
        how = dict(num_samples=n, max_new_tokens=tokens, seed=seed, ignore_eos=True)
        start = time.perf_counter()
        out = engine.generate(ids, speculate=speculate, progress=False, **how, **settings)
        return out.stats.tokens / (time.perf_counter() - start), out.stats.tokens_per_step

    return draw


def _vllm(side: Vllm) -> Draw:
    def draw(ids: list[int], n: int, tokens: int, seed: int, settings: dict) -> tuple:
        answer = side.call([ids], n, tokens, ignore_eos=True, settings=settings)
        return sum(map(len, answer["samples"][0])) / answer["seconds"], None

    return draw


def measure(
    sides: dict[str, Draw],
    prompts: list[list[int]],
    n: int,
    tokens: int,
    pairs: int,
    own: dict,
    plain: dict,
) -> list[dict]:
    """Returns a row for each side, n samples each."""
    kinds = {"own": own, "plain": plain}
    turns = list(product(sides, kinds))
    rates: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    taus: dict[tuple[str, str], list[float | None]] = {turn: [] for turn in turns}
    # the first round compiles and measures
    for i in range(-1, pairs):
        for name, kind in turns if i % 2 else turns[::-1]:
            ids = prompts[i % len(prompts)]
            rate, tau = sides[name](ids, n, tokens, max(i, 0), kinds[kind])
            if i >= 0:
                rates[name, kind].append(rate)
                taus[name, kind].append(tau)
    best = [max(rates[name, "own"][i] for name in CSD) for i in range(pairs)]
    rows = []
    for name in sides:
        row = {"samples": n, "side": name}
        for kind in kinds:
            row[f"{kind} tok/s"] = statistics.median(rates[name, kind])
        row["own / plain"], row["low"], row["high"] = ratio(
            rates[name, "own"], rates[name, "plain"]
        )
        if name in CSD:
            row |= {f"tau, {kind}": statistics.median(taus[name, kind]) for kind in kinds}
        else:
            row["csd / it"], row["csd / it, low"], row["csd / it, high"] = ratio(
                best, rates[name, "own"]
            )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
