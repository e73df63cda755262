"""The drafter's own time per step, by the length and the number of the samples.

    python -m bench drafter_cost --json F [--samples 4 16 64 256] [--history 512 2048 8192]
    python -m bench drafter_cost --drafters consensus --samples 8 --nodes 64 --temperature 0.7

Synthetic samples: pieces of eight random texts of 512 tokens, in random order, with one token in 33
replaced. They are inserted into the drafter up to a history's length; then steps are timed, with
`--nodes` drafted nodes over all samples. At a `--temperature` above 0 the graph's estimates are
coupled to the sampling noise, as in a real run. `consensus` runs its CPU references completely:
look-up, trees, pool, insertion. For the others only their own calls are timed (`draft` and `extend`
of each sample), not the construction of the pool: `suffix-tree`, SuffixDecoding in C++, if
arctic-inference is installed; the source paper's drafter on the host, literally and with k
shrinking, whose search reads all texts; prompt lookup; and REST, whose datastore has as many tokens
as the samples.

The graph's rows also have the number of contexts that an insertion touches and of their
successors, which it merges with the new ones: at most `--successors` per context, fewer while the
history is short. New rows replace the same rows of an existing F.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from bench.lib.common import finish, merged, table
from csd.evaluate.replay import Recording
from csd.graph.consensus import ConsensusGraph
from csd.graph.host_tree import HostTree
from csd.graph.registry import make_drafter
from csd.kernels.ops import reference
from csd.kernels.verify.advance_slots import advance_slots_ref
from csd.research.baselines.host_drafter import HostDrafter
from csd.research.baselines.multi_sample_paper import Paper
from csd.research.baselines.rest import Datastore, Rest
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import MAX_DEPTH, Pool
from csd.state.slots import Slots
from csd.traces.traces import Trace

NODES = 256  # the default
VOCAB, TEXTS, LENGTH, CHANGED = 32000, 8, 512, 0.03
# tokens reserved for the timed steps
SPARE = 200
# most samples: above, the paper's drafter takes seconds per step, and building REST's datastore a
# minute
FEW = {"paper": 16, "paper-shrinking": 16, "rest": 16}
DRAFTERS = ("consensus", "suffix-tree", "paper", "paper-shrinking", "prompt-lookup", "rest")


def synthetic(samples: int, length: int, seed: int = 0) -> Trace:
    """Trace of random samples of `length` tokens that share pieces of text."""
    rng = random.Random(samples + 1000 * seed)
    texts = [[rng.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(TEXTS)]
    drawn = []
    for _ in range(samples):
        tokens: list[int] = []
        while len(tokens) < length:
            text, size = rng.choice(texts), rng.randint(32, 128)
            at = rng.randrange(LENGTH - size)
            tokens += [
                rng.randrange(VOCAB) if rng.random() < CHANGED else t for t in text[at : at + size]
            ]
        drawn.append(tokens[:length])
    return Trace(0, texts[0][:64], drawn, 0.7, None)


def observed(recording: Recording, slots: Slots, count: int) -> Pool:
    """Pool with a chain per sample: its root and the next `count` - 1 recorded tokens."""
    S, N = slots.count, slots.context.shape[1]
    pool = Pool.empty(S * count, S, 1, N)
    depth = torch.arange(count).repeat(S)
    slot = torch.arange(S).repeat_interleave(count)
    at = slots.generated[slot].long() + depth
    row = torch.arange(S * count)
    # source of the rows' contexts: the slot's context, then the recorded tokens
    line = torch.cat([slots.context.flip(1), _next(recording, slots, count)], 1)
    place = N + depth[:, None] - 1 - torch.arange(N)
    pool.context.copy_(line[slot[:, None], place])
    pool.token.copy_(pool.context[:, 0])
    pool.parent.copy_(torch.where(depth > 0, row - 1, -1))
    pool.slot.copy_(slot)
    pool.depth.copy_(depth)
    pool.position.copy_(slots.prompt_len[0] + at)
    pool.slot_start.copy_(torch.arange(S) * count)
    pool.slot_nodes.fill_(count)
    pool.group_start[1] = S * count
    return pool


def _next(recording: Recording, slots: Slots, count: int) -> torch.Tensor:
    at = slots.generated[:, None].long() + torch.arange(count)
    return recording.token.gather(1, at)


def touched(table: Table) -> tuple[int, int]:
    """Numbers of contexts that the last insertion touched, and of their successors."""
    entry = (table.entry_stamp == table.step).nonzero()[:, 0]
    return entry.numel(), int((table.succ_token[entry] >= 0).sum())


def consensus(
    trace: Trace,
    histories: list[int],
    steps: int,
    config: GraphConfig | None = None,
    nodes: int = NODES,
    temperature: float = 0.0,
) -> list[dict]:
    """Rows of the consensus graph at each history length."""
    drafter = ConsensusGraph(reference(), "cpu", config)
    recording = Recording(trace, len(trace.samples))
    slots = recording.slots(drafter.context)
    slots.temperature.fill_(temperature)
    drafter.observe_prompt(1, trace.prompt, 0, len(trace.prompt), slots)

    def step(pool, proposed):
        verdict = recording.verdict(pool, slots)
        advance_slots_ref(slots, verdict)
        start = time.perf_counter()
        drafter.insert(pool, slots, verdict)
        tokens = int(verdict.accept_count.sum())
        return proposed, time.perf_counter() - start, tokens

    rows = []
    for history in histories:
        while (left := history - int(slots.generated.min())) > 0:
            # samples may stay a few tokens ahead of the slowest one
            step(observed(recording, slots, min(left, MAX_DEPTH + 1)), 0.0)
        measured, seen = [], []
        for _ in range(steps):
            start = time.perf_counter()
            pool = drafter.propose(slots, slots.count + nodes)
            measured.append(step(pool, time.perf_counter() - start))
            seen.append(touched(drafter.table))
        counts = {"contexts": int((drafter.table.entry_group == 1).sum())}  # of 131,072
        for name, values in zip(("touched", "held"), zip(*seen, strict=True), strict=True):
            counts[name] = statistics.median(values)
        rows.append(row("consensus", trace, history, measured) | counts)
    return rows


def host(
    name: str, trace: Trace, histories: list[int], steps: int, total: int = NODES
) -> list[dict]:
    """Rows of a drafter of Python lists, with only `draft` and `extend` of every sample timed."""
    drafter = _made(name, trace)
    group = drafter.open(trace.prompt)
    at = 0
    rows = []
    nodes = max(1, total // len(trace.samples))
    for history in histories:
        for s, tokens in enumerate(trace.samples):
            drafter.extend(group, s, tokens[at:history], [0.5] * (history - at))
        at, measured = history, []
        for _ in range(steps):
            start = time.perf_counter()
            trees = []
            for s in range(len(trace.samples)):
                tree = HostTree(nodes, MAX_DEPTH)
                drafter.draft(group, s, tree)
                trees.append(tree)
            proposed = time.perf_counter() - start
            # every sample commits two tokens, as in a step with tau 2
            start = time.perf_counter()
            for s, tokens in enumerate(trace.samples):
                drafter.extend(group, s, tokens[at : at + 2], [0.5] * 2)
            measured.append((proposed, time.perf_counter() - start, 2 * len(trace.samples)))
            at += 2
        rows.append(row(name, trace, history, measured))
    return rows


def _made(name: str, trace: Trace) -> HostDrafter:
    if name == "paper":
        return Paper()
    if name == "rest":
        others = synthetic(len(trace.samples), max(map(len, trace.samples)), seed=1)
        return Rest(Datastore(others.samples))
    return make_drafter(name, None, None)


def row(name: str, trace: Trace, history: int, measured: list[tuple]) -> dict:
    propose, insert, tokens = zip(*measured, strict=True)
    return {
        "drafter": name,
        "N": len(trace.samples),
        "history": history,
        "propose_us": 1e6 * statistics.median(propose),
        "insert_us": 1e6 * statistics.median(insert),
        "tokens": statistics.median(tokens),
        "insert_us_a_token": 1e6 * sum(insert) / sum(tokens),
        # set for the graph only
        "contexts": 0,
        "touched": 0,
        "held": 0,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--history", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=9, help="timed; their median is printed")
    parser.add_argument("--nodes", type=int, default=NODES, help="drafted, over all samples")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the graph's slots")
    parser.add_argument("--successors", type=int, default=GraphConfig().successors)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--json", help="write here, and keep what is there of other rows")
    args = parser.parse_args(argv)
    config = GraphConfig(successors=args.successors)
    torch.set_num_threads(1)
    rows, left_out = [], []
    for samples in args.samples:
        trace = synthetic(samples, max(args.history) + SPARE)
        if "consensus" in args.drafters:
            rows += consensus(
                trace, sorted(args.history), args.steps, config, args.nodes, args.temperature
            )
        for name in args.drafters:
            if name == "consensus":
                continue
            if samples > FEW.get(name, samples):
                continue
            try:
                rows += host(name, trace, sorted(args.history), args.steps, args.nodes)
            except ImportError as error:
                if str(error) not in left_out:
                    left_out.append(str(error))
    print(table(rows))
    old = []
    if args.json and Path(args.json).exists():
        old = json.loads(Path(args.json).read_text())["rows"]
    rows = merged(old, rows, ("drafter", "N", "history"))
    result = {
        "bench": "drafter_cost",
        "nodes": args.nodes,
        "temperature": args.temperature,
        "left out": left_out,
        "rows": rows,
    }
    finish(result, args.json)


if __name__ == "__main__":
    main()
