"""Lattice noise: how much less the counts of a group's tokens vary, at recorded distributions.

    python -m bench lattice TRACES [--samples 8 16] [--draws 4000] [--json F]

Each sample's words are uniform and independent over tokens, so each sample is the model's; of N
samples of one prefix, a token's words are one in each of N equal intervals. In "nested scramble"
sample i's word is a scramble of the van der Corput number of i, with one scramble for all samples
of a group, position and token, which needs no N. In "permutation" each token permutes the N
intervals, "antithetic" pairs the words u and 1 - u, and "inverse CDF" scrambles one word per sample
instead of one per token. TRACES have the target's top tokens; their rest is one token.
Distributions are those at the first positions of each prompt's samples, by prefix, at which the
likeliest token has less than 95%.
"""

import argparse
from pathlib import Path

import numpy as np

from bench.lib.common import finish, table
from csd.traces.traces import Trace, read_traces

KINDS = ("independent", "nested scramble", "permutation", "antithetic", "inverse CDF")


def scrambled(rng: np.random.Generator, shape: tuple[int, ...], N: int) -> np.ndarray:
    """Words in (0, 1) [*shape, N]: nested scrambles of the van der Corput numbers of 0 .. N - 1."""
    bits = max(N - 1, 0).bit_length()
    stratum = np.zeros((*shape, N), np.int64)
    for level in range(bits):
        # a flip for each interval of this level: bit `level` of i is the next digit
        flips = rng.integers(0, 2, (*shape, 1 << level))
        digit = np.broadcast_to(np.arange(N) >> level & 1, stratum.shape)
        prefix = np.broadcast_to(np.arange(N) & ((1 << level) - 1), stratum.shape)
        stratum = stratum << 1 | digit ^ np.take_along_axis(flips, prefix, -1)
    return (stratum + rng.random(stratum.shape)) / (1 << bits)


def words(rng: np.random.Generator, kind: str, shape: tuple[int, ...], N: int) -> np.ndarray:
    """Words [*shape, N] of the N samples."""
    if kind == "independent":
        return rng.random((*shape, N))
    if kind == "permutation":
        stratum = rng.permuted(np.broadcast_to(np.arange(N), (*shape, N)), axis=-1)
        return (stratum + rng.random(stratum.shape)) / N
    if kind == "antithetic":
        half = rng.random((*shape, (N + 1) // 2))
        return np.concatenate([half, 1 - half], -1)[..., :N]
    return scrambled(rng, shape, N)


def draw(rng: np.random.Generator, kind: str, q: np.ndarray, draws: int, N: int) -> np.ndarray:
    """Tokens [draws, N] of N samples from the distribution q [T]."""
    if kind == "inverse CDF":
        u = words(rng, kind, (draws,), N)
        return np.minimum(np.searchsorted(q.cumsum(), u, side="right"), len(q) - 1)
    u = np.clip(words(rng, kind, (draws, len(q)), N), 1e-15, 1 - 1e-15)
    return (np.log(q)[:, None] - np.log(-np.log(u))).argmax(1)


def distributions(traces: list[Trace], positions: int) -> list[np.ndarray]:
    """Top probabilities and their rest, once for each prefix of at most `positions` tokens."""
    by_prefix = {}
    for trace in traces:
        for tokens, tops in zip(trace.samples, trace.top or [], strict=True):
            for i, (_, probability) in enumerate(tops[:positions]):
                p = np.array([x for x in probability if x > 0])
                q = np.array([*p, max(1 - p.sum(), 1e-6)])
                by_prefix[trace.problem, *tokens[:i]] = q / q.sum()
    return [q for q in by_prefix.values() if q.max() < 0.95]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--positions", type=int, default=4)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    every = distributions([t for path in args.traces for t in read_traces(path)], args.positions)
    rows = []
    for N in args.samples:
        for kind in KINDS:
            variance = exact = distinct = covered = worst = 0.0
            for q in every:
                drawn = draw(rng, kind, q, args.draws, N)
                count = (drawn[:, :, None] == np.arange(len(q))).sum(1)
                variance += count.var(0).sum()
                exact += (N * q * (1 - q)).sum()
                distinct += (count > 0).sum(1).mean()
                covered += ((count > 0) * q).sum(1).mean()
                error = np.sqrt(q * (1 - q) / args.draws)
                # of one sample: those of a draw are not independent
                first = (drawn[:, 0, None] == np.arange(len(q))).mean(0)
                often = q * args.draws > 20
                worst = max(worst, (abs(first - q) / error)[often].max())
            rows.append(
                {
                    "samples": N,
                    "noise": kind,
                    "variance of counts": variance / exact,
                    "distinct tokens": distinct / len(every),
                    "probability covered": covered / len(every),
                    "largest deviation of a sample, in errors": worst,
                }
            )
    print(table(rows))
    names = [Path(path).name for path in args.traces]
    result = {"bench": "lattice", "traces": names, "distributions": len(every)}
    finish(result | {"draws": args.draws, "positions": args.positions, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
