"""GRPO whose reward rises: seconds, memory and agreement of each step, csd's trainer against TRL's.

    python -m bench grpo [--sides csd trl trl_batch] [--seeds 0 1 2] [--steps 60] [--prompts 4]
        [--samples 8] [--tokens 10] [--problems 500] [--beta B] [--rate R] [--packed MODEL]
        [--json F]
    python -m bench grpo --plot [F.svg] [--json F]
    python -m bench grpo --compare F [F ..]

The run of `examples/grpo/grpo_letters.py`: SmolLM2-135M in bfloat16 with LoRA learns to
reverse letters, by TRL's loss. A step draws --samples completions of --prompts problems. csd's
trainer draws and computes log-probabilities by csd, TRL's by transformers: "trl" draws by
`generate`, and "trl_batch", which runs only where it is named, by `generate_batch`. Prompts,
rewards, limits and settings are the same, the drawn tokens are not. Every run is a process of its
own with one thread. The file has a run for each side and seed, is written after each, and a rerun
does those that it lacks. A step has the seconds of the wall by part, CPU seconds, the peak
of the resident set, the reward, the drawn tokens, the largest difference between a token's
log-probability in trainer and sampler, the share of tokens whose ratio of these would be clipped,
TRL's own clip fraction, the gradient's norm and, with --beta, the KL divergence. A run ends with
the trained model's rewards of --problems answers: one to each of the same problems, which no run
has trained on, drawn by csd with one seed. --packed trains adapters over a GGUF file, which csd's
trainer takes as it is and TRL's unpacked to float32. --plot draws the reward, from the file alone.
--compare prints the mean rewards of each run of some files, and p of an exact permutation test of
csd's and TRL's means.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.e2e.grpo import picture
from bench.lib.common import finish, merged, table, write

# whose minutes are in the table
REWARD = 0.7
# steps at a run's beginning and end whose means are in the table
ENDS = 8
RESULT, PICTURE = Path("bench/results/grpo.json"), Path("bench/results/grpo.svg")
SIDES = ("csd", "trl", "trl_batch")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=4, help="problems of a step")
    parser.add_argument("--samples", type=int, default=8, help="completions of a problem")
    parser.add_argument("--tokens", type=int, default=10, help="of a completion at most")
    parser.add_argument("--problems", type=int, default=500, help="answered after the last step")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL divergence")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate, which falls to 0")
    parser.add_argument("--packed", help="a name of `bench models`, or a GGUF file")
    parser.add_argument("--plot", type=Path, nargs="?", const=PICTURE, help="draw the file only")
    parser.add_argument("--compare", type=Path, nargs="+", help="print the files' rewards only")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    if args.compare:
        files = [json.loads(path.read_text()) for path in args.compare]
        print(table(compared([run for file in files for run in file["runs"]])))
        return
    names = ("steps", "prompts", "samples", "tokens", "beta")
    settings = {name: getattr(args, name) for name in names} | {"learning_rate": args.rate}
    settings |= {"packed": args.packed} if args.packed else {}
    result: dict[str, Any] = {"bench": "grpo", "settings": settings, "runs": []}
    if args.json.exists():
        result |= json.loads(args.json.read_text())
    if args.plot:
        picture.draw(result, args.plot)
        print(table(summary(result)))
        return
    if result["settings"] != settings:
        raise SystemExit(
            f"{args.json} has runs with {result['settings']}, name another file for {settings}"
        )
    done = {(r["side"], r["seed"]) for r in result["runs"]}
    # sides alternate, so that what else the machine does falls on both
    todo = [(x, seed) for seed in args.seeds for x in args.sides if (x, seed) not in done]
    if any(side == "csd" for side, _ in todo):
        # fills the cache of compiled loops
        alone("csd", 0, settings | dict(steps=1, prompts=1, samples=2, tokens=2), 0)
    for side, seed in todo:
        new = alone(side, seed, settings, args.problems)
        result["runs"] = merged(result["runs"], [new], ("side", "seed"))
        result["rows"] = summary(result)
        write(result, args.json)
        print(table(result["rows"]), flush=True)
    if not todo:
        print(table(summary(result)))
        return
    finish(result, args.json)


def alone(side: str, seed: int, settings: dict[str, Any], problems: int) -> dict[str, Any]:
    """`bench.e2e.grpo.run.run` in a process of its own, with one thread."""
    from bench.e2e.grpo.run import run

    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as process:
        return process.submit(run, side, seed, settings, problems=problems).result()


def minutes_to(reward: float, runs: list[dict[str, list]]) -> float | None:
    """Minutes until the mean of the runs' smoothed rewards is `reward`; None if it never is."""
    rewards = zip(*(picture.smooth(r["reward"]) for r in runs), strict=True)
    minutes = zip(*map(picture.elapsed, runs), strict=True)
    pairs = zip(map(statistics.mean, rewards), map(statistics.mean, minutes), strict=True)
    return next((at for reached, at in pairs if reached >= reward), None)


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each side, over the steps of all its seeds."""
    rows = []
    for side in SIDES:
        own = sorted((r for r in result["runs"] if r["side"] == side), key=lambda r: r["seed"])
        runs = [r["steps"] for r in own]
        if not runs:
            continue

        def every(name: str, runs: list = runs) -> list[float]:
            return [x for steps in runs for x in steps.get(name, ())]

        seconds = {n: statistics.median(every(f"{n}seconds")) for n in ("", "cpu_")}
        parts = {n: statistics.median(every(f"{n}_seconds")) for n in ("rollout", "train")}
        rest = zip(*(every(f"{n}seconds") for n in ("", "rollout_", "train_")), strict=True)
        row: dict[str, Any] = {"side": side, "seeds": len(runs), "steps": len(every("reward"))}
        for name, of in (("first", slice(ENDS)), ("last", slice(-ENDS, None))):
            for figure in ("reward", "solved"):
                row[f"{name} {figure}"] = statistics.mean(x for r in runs for x in r[figure][of])
        by_seed = [statistics.mean(r["reward"][-ENDS:]) for r in runs]
        row["last reward by seed"] = " ".join(f"{reward:.2f}" for reward in by_seed)
        finals = [r["final"] for r in own if "final" in r]
        for figure in ("reward", "solved"):
            if finals:
                row[f"final {figure} by seed"] = " ".join(f"{x[figure]:.2f}" for x in finals)
        row[f"minutes to {REWARD}"] = minutes_to(REWARD, runs)
        row |= {"s / step": seconds[""], "CPU s": seconds["cpu_"]}
        if pairs := picture.by_csds(side, result["runs"]):
            row["by csd's s"] = statistics.median(pairs)
        row |= {"rollout s": parts["rollout"], "training s": parts["train"]}
        row["rest s"] = statistics.median(all_of - a - b for all_of, a, b in rest)
        row["minutes"] = sum(every("seconds")) / 60 / len(runs)
        row["tokens"] = sum(every("tokens"))
        row["peak MB"] = max(every("memory_mb"))
        row["largest difference"] = max(every("difference"))
        row["outside clip"] = statistics.mean(every("outside_clip"))
        row["clipped"] = statistics.mean(every("clip_fraction"))
        if every("grad_norm"):
            row["gradient norm"] = statistics.median(every("grad_norm"))
        if every("kl"):
            row["last KL"] = statistics.mean(x for r in runs for x in r["kl"][-ENDS:])
        rows.append(row)
    return rows


# of a run: steps whose rewards are compared
PARTS = {"19 to 30": slice(18, 30), f"last {ENDS}": slice(-ENDS, None)}


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each part of a run: each run's mean reward there, and p of csd's and TRL's."""
    rows = []
    for name, steps in PARTS.items():
        means: dict[str, list[float]] = {side: [] for side in SIDES}
        for run in sorted(runs, key=lambda run: run["seed"]):
            means[run["side"]].append(statistics.mean(run["steps"]["reward"][steps]))
        row: dict[str, Any] = {"mean reward of steps": name}
        row |= {side: " ".join(f"{x:.3f}" for x in own) for side, own in means.items() if own}
        if means["csd"] and means["trl"]:
            row["p"] = chance(means["csd"], means["trl"])
        rows.append(row)
    return rows


def chance(a: list[float], b: list[float]) -> float:
    """Share of the splits of a and b, by their sizes, whose means are at least as far apart."""
    every = [*a, *b]

    def apart(chosen: tuple[int, ...]) -> float:
        rest = [x for i, x in enumerate(every) if i not in chosen]
        return abs(statistics.mean(every[i] for i in chosen) - statistics.mean(rest))

    found = apart(tuple(range(len(a)))) - 1e-12
    splits = [apart(x) >= found for x in itertools.combinations(range(len(every)), len(a))]
    return sum(splits) / len(splits)


if __name__ == "__main__":
    main()
