"""Steps until a call's last sample, by which samples get more of the last steps' nodes.

    python -m bench.history_ends TRACES [--live 4] [--history 4] [--slots 32] [--nodes 8] [--apart]
        [--problems 12] [--json F]

Once no prompt waits, nodes of samples that are expected to end before the last one count as less
likely (`csd.state.pool.head_starts`). The engine's own queue runs with

    position    what csd does: the fewer tokens it has, the later a sample is expected to end
    none        no sample preferred
    expected    by tokens left: the mean of what the longer ones of the prompt's finished and
                earlier samples had left there, 0 where it is longer than all of them
    true        by tokens left, as recorded: more than any rule can have

All prompts of a file are one call; `--apart`: each is a call, and steps are their sum. A result
file that exists is completed: other calls stay.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.common import finish, table
from bench.queue import drawn
from bench.share_call import first
from csd.kernels.draft_tree.reference import starts_ahead
from csd.kernels.noise import prompt_key
from csd.state.pool import MOST_AHEAD
from csd.traces.traces import Trace, read_traces

RULES = ("position", "none", "expected", "true")


class Left:
    """Tokens that live samples have left, by one of the last two rules."""

    def __init__(self, traces: list[Trace], history: int, rule: str):
        self.true, self.seen, self.rule = {}, set(), rule
        self.known: dict[int, list[int]] = {}  # lengths, by key
        for i, t in enumerate(traces):
            key = prompt_key(t.seed or i, t.prompt)
            kept = len(t.samples) - history
            for index, said in zip(t.indices or range(kept), t.samples[:kept], strict=False):
                self.true[key, index] = len(said)
            self.known[key] = [len(said) for said in t.samples[kept:]]

    def __call__(self, key: int, sample: int, generated: int) -> float:
        if self.rule == "true":
            return self.true[key, sample] - generated
        longer = [n - generated for n in self.known[key] if n > generated]
        return sum(longer) / max(len(longer), 1)

    def head_starts(self, state: Any, live: np.ndarray) -> np.ndarray:
        """[S] int64, in place of the reference's own."""
        where = [(int(state.key[s]), int(state.sample[s])) for s in live]
        for key, sample in self.seen - set(where):
            self.known[key].append(self.true[key, sample])
        self.seen = set(where)
        left = [self(*at, int(state.generated[s])) for at, s in zip(where, live, strict=True)]
        found = np.zeros(state.live.size, np.int64)
        found[live] = (state.pace[live] * (max(left) - np.array(left))).clip(0, MOST_AHEAD)
        return found


@contextmanager
def preferring(rule: str, traces: list[Trace], history: int) -> Iterator[None]:
    if rule == "position":
        starts = starts_ahead
    elif rule == "none":
        starts = lambda state, live: np.zeros(state.live.size, np.int64)  # noqa: E731
    else:
        starts = Left(traces, history, rule).head_starts
    with patch("csd.kernels.draft_tree.reference.starts_ahead", starts):
        yield


def steps(calls: list[list[Trace]], rule: str, args: argparse.Namespace) -> dict:
    """A line: of all calls, the steps to each one's last sample."""
    count = tokens = sample_steps = 0
    for traces in calls:
        with preferring(rule, traces, args.history):
            requests, watch, _ = drawn(traces, args.slots, None, args.nodes, args.history)
        count += len(watch.live)
        tokens += sum(r.stats.tokens for r in requests)
        sample_steps += sum(watch.live)
    return {"rule": rule, "steps": count, "tau": tokens / sample_steps}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--live", type=int, default=4)
    parser.add_argument("--history", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=8, help="drafted tokens a slot and step")
    parser.add_argument("--apart", action="store_true", help="each prompt is a call")
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, dict] = {}
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())["calls"]
    for path in args.traces:
        traces = [first(t, args.live + args.history) for t in read_traces(path)][: args.problems]
        calls = [[t] for t in traces] if args.apart else [traces]
        rows = [steps(calls, rule, args) for rule in RULES]
        for row in rows:
            row["to position"] = row["steps"] / rows[0]["steps"]
        name = Path(path).name.split(".jsonl")[0] + ", apart" * args.apart
        options = {n: getattr(args, n) for n in ("live", "history", "slots", "nodes")}
        found[name] = {"problems": len(traces), **options, "rows": rows}
        print(name, table(rows), sep="\n", flush=True)
    finish({"bench": "history_ends", "calls": found}, args.json)


if __name__ == "__main__":
    main()
