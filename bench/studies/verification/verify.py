"""Verification schemes on a real model's targets and its graph's proposals.

    python -m bench verify [pairs] [trees] [time] [--settings T=0.7 ...] [--json FILE]
    python -m bench verify --table FILE [--plot PICTURE]
    python -m bench verify --figures DIR

Three parts, all of them by default. New rows replace the same rows of an existing FILE:

pairs  SmolLM2-135M-Instruct answers word problems; at every position of every sample the target and
       the consensus graph's blended distribution over its stored successors are recorded, before
       the position is inserted into the graph. For K = 2, 4, 8 the rows have the mean acceptance of
       each scheme and the bound on those pairs, exact except for two: drawing without replacement
       beyond K = 2 (64 draws per pair), and `match, coupled`, the engine's own drafts and samples
       at the position, under 8 keys.
trees  block efficiency, tokens committed per sample and step, of whole generations with `--nodes`
       drafted rows per sample.
time   milliseconds of one decision for 16 rows, on the few atoms that the engine uses and on a
       whole vocabulary.

`--table` prints the tables of docs/verifiers.md from a FILE and measures nothing. `--figures`
measures and draws the figures of Khisti et al. (`verify_figures.py`) into DIR.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.common import finish, machine, merged, table
from bench.studies.verification.verify_drawing import draw
from bench.studies.verification.verify_drawing import tables as figure_tables
from bench.studies.verification.verify_figures import figures
from bench.studies.verification.verify_pairs import SETTINGS, Pairs, flat, record
from bench.studies.verification.verify_tables import DRAFTS, FLAT, ORDER, plot, tables
from csd.models.demo import smollm2_path
from csd.verify import (
    SCHEMES,
    Canonical,
    Match,
    Noise,
    Recursive,
    fixed_drafts,
    multi_draft,
    optimal_acceptance,
)

# Monte Carlo draws per pair where there is no closed form
DRAWS = 64
VERIFIERS = ("match", *sorted(multi_draft.DRAWS))
PARTS = ("pairs", "trees", "time")


def acceptance(pairs: Pairs, k: int, generator) -> dict[str, torch.Tensor]:
    """Returns scheme -> acceptance [n] of every pair with k drafts."""
    q, p = pairs.target, pairs.proposal
    out = {"bound": optimal_acceptance(q, p, k)}
    out["canonical, whole"] = Canonical(None, None).acceptance(q, p, k)
    out["canonical"] = Canonical().acceptance(q, p, k)
    out["canonical, s=3"] = Canonical(tokens=3).acceptance(q, p, k)
    for name in ("kseq", "recursive", "single"):
        out[name] = SCHEMES[name].acceptance(q, p, k)
    if q.shape[1] <= 16:
        out["bound, no replacement"] = optimal_acceptance(q, p, k, replacement=False)
    out["no replacement"] = without_replacement(q, p, k, generator)
    out["match, drawn"] = Match().acceptance(q, p, k)
    out["match, fixed"] = Match().outcome(fixed_drafts(p, k), q, p).accept.sum(-1)
    if pairs.coupled is not None:
        out["match, coupled"] = pairs.coupled[:, k - 1]
    return out


def without_replacement(q, p, k: int, generator) -> torch.Tensor:
    """Acceptance [n] of `recursive` with drafts drawn without replacement."""
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


def rows_of(name: str, pairs: Pairs, generator) -> list[dict]:
    """Rows of mean acceptance by scheme and K, and of shares of pairs that violate ORDER."""
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
    print(table(rows), flush=True)
    return rows


def chats(count: int) -> list:
    return [[{"role": "user", "content": p}] for p in PROBLEMS[:count]]


def trees(engine, setting: str, args) -> list[dict]:
    """Rows of the block efficiency of every verifier, with equal numbers of drafted rows."""
    rows = []
    prompts = chats(args.prompts)
    several = sorted(v for v, k in multi_draft.DRAWS.items() if k > 1)
    # single uses one draft only
    kinds = [("match", 0), ("single", 1)] + [(v, k) for k in args.draws for v in several]
    kinds = [(v, k) for v, k in kinds if v in args.verifiers]
    usual = dict(multi_draft.DRAWS)
    for verifier, draws in kinds:
        if draws:
            multi_draft.DRAWS[verifier] = draws
        out = csd.generate(
            engine,
            prompts,
            num_samples=args.tree_samples,
            max_new_tokens=args.tokens,
            seed=1,
            verifier=verifier,
            budget=args.nodes * len(prompts) * args.tree_samples,
            **SETTINGS[setting],
        )
        multi_draft.DRAWS.update(usual)
        proposed, accepted, steps = (
            sum(getattr(o.stats, x) for o in out)
            for x in ("nodes_proposed", "nodes_accepted", "sample_steps")
        )
        rows.append(
            {
                "setting": setting,
                "verifier": verifier,
                "draws": draws,
                "nodes": proposed / steps,
                "accepted": accepted / max(proposed, 1),
                # per problem
                "tokens": [o.stats.tokens for o in out],
                "steps": [o.stats.sample_steps for o in out],
            }
        )
        print(setting, verifier, draws, f"tau {sum(rows[-1]['tokens']) / steps:.3f}", flush=True)
    return rows


def times(rows: int = 16, repeats: int = 9) -> list[dict]:
    """Median milliseconds of `decide` for `rows` rows."""
    out = []
    generator = torch.Generator().manual_seed(0)
    schemes = SCHEMES | {"no replacement": Recursive(replacement=False)}
    for vocab in (9, 49_152):
        target = (torch.randn(rows, vocab, generator=generator) * 4).softmax(-1)
        proposal = (target.log() + torch.randn(rows, vocab, generator=generator)).softmax(-1)
        for name, scheme in schemes.items():
            row = {"vocabulary": vocab, "scheme": name}
            for k in DRAFTS:
                again = name != "no replacement"
                drafts = proposal.multinomial(k, replacement=again, generator=generator)
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


def measure(args, result: dict) -> None:
    """Run the parts that `args` names and add their rows to `result`."""
    no_setting = ("json", "table", "plot", "figures")
    arguments = {k: v for k, v in vars(args).items() if k not in no_setting}
    ran = {"machine": machine(), "arguments": arguments}
    engine = None if args.parts == ["time"] else csd.Engine(smollm2_path(), dtype=torch.float32)
    if "pairs" in args.parts:
        rows, recorded = [], result.setdefault("recorded", {})
        for name in args.settings:
            pairs = record(engine, chats(args.prompts), args.samples, args.tokens, SETTINGS[name])
            recorded[name] = {
                "positions": pairs.positions,
                "with a proposal": len(pairs.target),
                "target mass kept": float(pairs.target[:, :-1].sum(-1).mean()),
            }
            rows += rows_of(name, pairs, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(0)
        rows += rows_of(FLAT, flat(24, 60, generator), generator)
        old = result.get("acceptance", [])
        result["acceptance"] = merged(old, rows, ("pairs", "scheme"))
    if "trees" in args.parts:
        rows = [row for name in args.settings for row in trees(engine, name, args)]
        old = result.get("trees", [])
        result["trees"] = merged(old, rows, ("setting", "verifier", "draws"))
    if "time" in args.parts:
        result["time"] = times()
    runs = result.setdefault("runs", {})
    for part in args.parts:
        for name in args.settings if part != "time" else [""]:
            runs[f"{part} {name}".strip()] = ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help="pairs, trees, time; or all")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt, for pairs")
    parser.add_argument("--tree-samples", type=int, default=4, help="of a prompt, for trees")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=8, help="drafted rows a sample, for trees")
    parser.add_argument("--draws", type=int, nargs="*", default=[2], help="K, for trees")
    parser.add_argument(
        "--verifiers", nargs="+", choices=VERIFIERS, default=VERIFIERS, help="for trees"
    )
    parser.add_argument("--json", help="write here, and keep what is there of other parts")
    parser.add_argument("--table", metavar="FILE", help="print this file's tables instead")
    parser.add_argument("--plot", help="with --table: write the picture of the pairs here")
    parser.add_argument("--figures", metavar="DIR", help="measure and draw the paper's figures")
    args = parser.parse_args()
    if args.figures:
        folder = Path(args.figures)
        folder.mkdir(parents=True, exist_ok=True)
        result = figures()
        draw(result, folder)
        print("\n\n".join(figure_tables(result)))
        finish(result, folder / "verify_figures.json")
        return
    if args.table:
        result = json.loads(Path(args.table).read_text())
        print("\n\n".join(tables(result)))
        if args.plot:
            plot(result["acceptance"], args.plot)
        return
    args.parts = args.parts or list(PARTS)
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"part must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")

    torch.set_num_threads(1)
    result: dict = {"bench": "verify"}
    if args.json and Path(args.json).exists():
        result = json.loads(Path(args.json).read_text())
    measure(args, result)
    finish(result, args.json)


if __name__ == "__main__":
    main()
