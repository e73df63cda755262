"""Verification schemes on a real model's targets and its graph's proposals.

    python -m bench.verify [--prompts 8] [--samples 8] [--tokens 48] [--json FILE] [--plot FILE]

Three tables; with `--only` one of them, which then replaces its part of an existing FILE:

pairs  SmolLM2-135M-Instruct answers word problems; at every position of every sample the target and
       the consensus graph's blended distribution over the successors it keeps are recorded, before
       the graph sees the position. For K = 2, 4, 8 the mean acceptance of each scheme and the bound
       on those pairs, exact but for `coupled` and `no replacement` beyond K = 2 (64 draws a pair).
trees  block efficiency, tokens committed per sample and step, of whole generations with `--nodes`
       drafted rows a sample; its interval is a bootstrap over prompts.
time   milliseconds of one decision for 16 rows, on the few atoms the engine decides on and on a
       whole vocabulary.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

import csd
from bench.common import finish, machine, table
from bench.cpu import PROBLEMS
from bench.replay import interval
from bench.verify_pairs import SETTINGS, Pairs, flat, record
from csd.models.demo import smollm2_path
from csd.verify import (
    SCHEMES,
    Canonical,
    Match,
    Noise,
    Recursive,
    coupled_drafts,
    fixed_drafts,
    optimal_acceptance,
)
from csd.verify import sampler as sampler_file

DRAFTS = (2, 4, 8)
# Monte Carlo draws a pair where there is no closed form
DRAWS = 64
# what the paper orders
ORDER = ("bound", "canonical", "kseq", "recursive")


def acceptance(pairs: Pairs, k: int, generator) -> dict[str, torch.Tensor]:
    """Scheme -> acceptance [n] of every pair, with k drafts."""
    q, p = pairs.target, pairs.proposal
    out = {"bound": optimal_acceptance(q, p, k)}
    out["canonical, whole"] = Canonical(None, None).acceptance(q, p, k)
    out["canonical"] = Canonical().acceptance(q, p, k)
    out["canonical, s=3"] = Canonical(tokens=3).acceptance(q, p, k)
    for name in ("kseq", "recursive", "single"):
        out[name] = SCHEMES[name].acceptance(q, p, k)
    out["no replacement"] = _without_replacement(q, p, k, generator)
    out["match, drawn"] = Match().acceptance(q, p, k)
    out["match, fixed"] = Match().outcome(fixed_drafts(p, k), q, p).accept.sum(-1)
    if pairs.blend is not None:
        out["match, coupled"] = _coupled(pairs, k, generator)
    return out


def _without_replacement(q, p, k: int, generator) -> torch.Tensor:
    scheme = Recursive(replacement=False)
    if k == 2 and q.shape[1] < 16:
        return scheme.acceptance(q, p, k)
    total = torch.zeros(q.shape[0], dtype=torch.float64)
    support = (p > 0).sum(-1, keepdim=True)
    for _ in range(DRAWS):
        noise = torch.rand(p.shape, generator=generator, dtype=torch.float64)
        # the k largest perturbed scores are k draws without replacement, in order
        score = p.log() - (-noise.log()).log()
        drafts = score.topk(min(k, p.shape[1])).indices
        drafts = torch.where(torch.arange(drafts.shape[1]) < support, drafts, -1)
        total += scheme.outcome(drafts, q, p).accept.sum(-1)
    return total / DRAWS


def _coupled(pairs: Pairs, k: int, generator) -> torch.Tensor:
    hits = torch.zeros(pairs.target.shape[0], dtype=torch.float64)
    for _ in range(DRAWS):
        noise = torch.rand(pairs.target.shape, generator=generator, dtype=torch.float64)
        gumbel = -(-noise.log()).log()
        drafts = coupled_drafts(pairs.blend, gumbel, k)
        hits += Match().decide_coupled(drafts, pairs.target, gumbel).draft >= 0
    return hits / DRAWS


def rows_of(name: str, pairs: Pairs, generator) -> list[dict]:
    """Mean acceptance by scheme and K, and how many pairs break the paper's order."""
    every = {k: acceptance(pairs, k, generator) for k in DRAFTS}
    rows = []
    for scheme in every[DRAFTS[0]]:
        row = {"pairs": name, "scheme": scheme}
        row |= {f"K={k}": float(every[k][scheme].mean()) for k in DRAFTS}
        rows.append(row)
    for better, worse in pairwise(ORDER):
        row = {"pairs": name, "scheme": f"share {better} < {worse}"}
        for k in DRAFTS:
            row[f"K={k}"] = float((every[k][better] < every[k][worse] - 1e-9).double().mean())
        rows.append(row)
    return rows


def pair_tables(engine, args) -> dict:
    generator = torch.Generator().manual_seed(0)
    found, rows = {}, []
    for name, options in SETTINGS.items():
        pairs = record(engine, args.prompts, args.samples, args.tokens, options)
        found[name] = {"positions": pairs.positions, "with a proposal": len(pairs.target)}
        found[name]["target mass kept"] = float(pairs.target[:, :-1].sum(-1).mean())
        rows += rows_of(name, pairs, generator)
        print(table(rows[-len(rows) // len(found) :]), flush=True)
    rows += rows_of("flat, 60 tokens", flat(24, 60, generator), generator)
    print(table(rows), flush=True)
    return {"recorded": found, "acceptance": rows}


def trees(engine, args) -> list[dict]:
    """Block efficiency of every verifier, at the same number of drafted rows."""
    rows = []
    prompts = [[{"role": "user", "content": p}] for p in PROBLEMS[: args.prompts // 2]]
    samples = args.samples // 2
    for temperature in args.temperatures:
        for verifier, draws in [("match", 0)] + [
            (v, k) for k in args.draws for v in sorted(sampler_file.DRAWS)
        ]:
            if draws:
                sampler_file.DRAWS[verifier] = draws
            out = csd.generate(
                engine, prompts, num_samples=samples, max_new_tokens=args.tokens, seed=1,
                temperature=temperature, verifier=verifier,
                budget=args.nodes * len(prompts) * samples,
            )  # fmt: skip

            def tau(pick, out=out):
                stats = [out[i].stats for i in pick]
                return sum(s.tokens for s in stats) / sum(s.sample_steps for s in stats)

            low, high = interval(tau, len(prompts))
            sums = {
                field: sum(getattr(o.stats, field) for o in out)
                for field in ("tokens", "sample_steps", "nodes_proposed", "nodes_accepted")
            }
            seconds = out[0].stats.seconds
            rows.append({
                "temperature": temperature,
                "verifier": verifier,
                "draws": draws or "-",
                "tau": tau(range(len(prompts))),
                "low": low,
                "high": high,
                "nodes": sums["nodes_proposed"] / sums["sample_steps"],
                "accepted": sums["nodes_accepted"] / max(sums["nodes_proposed"], 1),
                "propose s": seconds["propose"],
                "verify s": seconds["verify"],
                "forward s": seconds["forward"],
            })  # fmt: skip
            print(table(rows[-1:]), flush=True)
    print(table(rows), flush=True)
    return rows


def times(rows: int = 16, repeats: int = 5) -> list[dict]:
    """Milliseconds of `decide` for `rows` rows, medians."""
    out = []
    generator = torch.Generator().manual_seed(0)
    for vocab in (9, 49_152):
        target = (torch.randn(rows, vocab, generator=generator) * 4).softmax(-1)
        proposal = (target.log() + torch.randn(rows, vocab, generator=generator)).softmax(-1)
        for name, scheme in SCHEMES.items():
            row = {"vocabulary": vocab, "scheme": name}
            for k in DRAFTS:
                drafts = proposal.multinomial(k, replacement=True, generator=generator)
                u = torch.rand(rows, k + 2, generator=generator, dtype=torch.float64)
                noise = Noise(u[:, 0], u[:, 1 : k + 1], u[:, k + 1])
                taken = []
                for _ in range(repeats + 1):
                    start = time.perf_counter()
                    scheme.decide(drafts, target, proposal, noise)
                    taken.append(1e3 * (time.perf_counter() - start))
                row[f"K={k} ms"] = statistics.median(taken[1:])
            out.append(row)
    print(table(out), flush=True)
    return out


def plot(rows: list[dict], path: str) -> None:
    """Acceptance over K, one panel a kind of pairs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = ("bound", "canonical", "kseq", "recursive", "match, coupled", "match, fixed", "single")
    names = list(dict.fromkeys(r["pairs"] for r in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3 * len(names), 3.2), sharey=False)
    for name, axis in zip(names, axes, strict=True):
        for scheme in shown:
            for row in rows:
                if row["pairs"] == name and row["scheme"] == scheme:
                    style = "k--" if scheme == "bound" else "o-"
                    values = [row[f"K={k}"] for k in DRAFTS]
                    axis.plot(DRAFTS, values, style, label=scheme, markersize=3, linewidth=1)
        axis.set_title(name, fontsize=9)
        axis.set_xticks(DRAFTS)
        axis.set_xlabel("drafts K")
    axes[0].set_ylabel("acceptance")
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("pairs", "trees", "time"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=8, help="drafted rows a sample, for trees")
    parser.add_argument("--draws", type=int, nargs="+", default=[2, 4], help="K, for trees")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.7, 1.0], help="for trees"
    )
    parser.add_argument("--plot", help="write the picture of the pairs here")
    parser.add_argument("--json")
    args = parser.parse_args()

    torch.set_num_threads(1)
    result = {"bench": "verify"}
    if args.only and args.json and Path(args.json).exists():
        result = json.loads(Path(args.json).read_text())
    result |= {"machine": machine(), "arguments": vars(args)}
    engine = None if args.only == "time" else csd.Engine(smollm2_path())
    if args.only in (None, "pairs"):
        result |= pair_tables(engine, args)
        if args.plot:
            plot(result["acceptance"], args.plot)
    if args.only in (None, "trees"):
        fresh = trees(engine, args)
        old = [r for r in result.get("trees", []) if r["temperature"] not in args.temperatures]
        result["trees"] = old + fresh
    if args.only in (None, "time"):
        result["time"] = times()
    finish(result, args.json)


if __name__ == "__main__":
    main()
