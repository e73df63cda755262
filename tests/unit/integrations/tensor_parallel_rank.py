"""One of two processes that share a model: tensor_parallel_rank.py FOLDER, under torchrun."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from helpers.examples_main import main_of
from helpers.models import checkpoints, families

import csd
from csd.engine.first_call import time_steps as step_timing
from csd.graph.registry import make_drafter
from csd.integrations.tensor_parallel import ParallelEngine, decoder
from csd.integrations.tensor_parallel.link import FollowerStep

PROMPTS = [[5, 17, 3, 60, 17, 3, 9] * 12, [8], [44, 2, 44, 7]]
SIZES = {
    "llama": {},
    "qwen2": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12),
    "mistral": dict(sliding_window=9, num_attention_heads=4),
    "smollm3": {},
    "granite": {},
    "qwen3": {},
}
CASES = {
    "fixed": dict(budget=16, temperature=0.9),
    "auto": dict(budget="auto", temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    "none": dict(speculate=False, temperature=1.0, top_k=20),
}


def build(family):
    if family not in checkpoints.FAMILIES:
        return families.build(family)
    return checkpoints.build(family, dtype=torch.float64, **SIZES[family])


def draw(engine, case, prompts=PROMPTS, **options):
    options = dict(num_samples=3, max_new_tokens=20, seed=4, **CASES[case]) | options
    return csd.generate(engine, prompts, **options)


class Watched(ParallelEngine):
    """Counts what follows from the leader's graph."""

    def drawn(self, case, **options):
        out = draw(self, case, **options)
        return dict(
            tokens=[r.tokens for r in out],
            logprobs=[r.logprobs for r in out],
            seeds=[r.seed for r in out],
            proposed=sum(r.stats.nodes_proposed for r in out),
            accepted=sum(r.stats.nodes_accepted for r in out),
        )


def corrupt(engine):
    """Give this rank a graph of its own, which learns as rank 0's does but for wrong successors."""
    graph = make_drafter("consensus", engine.ops, engine.device)
    insert, propose = graph.insert, FollowerStep.propose

    def wrong_insert(pool, slots, verdict, defer=False):
        insert(pool, slots, verdict)
        token = graph.table.succ_token
        token.copy_(torch.where(token >= 0, (token * 31 + 7) % 97, -1))
        graph.inserts = getattr(graph, "inserts", 0) + 1

    def with_graph(self, live, budget):
        self.drafter, self.drafting = graph, True
        return propose(self, live, budget)

    graph.insert, FollowerStep.propose = wrong_insert, with_graph
    return graph


def once(owner, name, error, after=0):
    """Let the method `name` of `owner` raise `error` at call `after`, from 0, and then no more."""
    method, calls = getattr(owner, name), []

    def call(*args):
        calls.append(args)
        if len(calls) > after:
            setattr(owner, name, method)
            raise error
        return method(*args)

    setattr(owner, name, call)
    return calls


def disagree():
    """Rank 1 commits something else: the next step must raise."""
    commit = FollowerStep.commit

    def wrong(self, pool, verdict):
        FollowerStep.commit = commit
        commit(self, pool, verdict)
        self.slots.context[0, 0] += 1

    FollowerStep.commit = wrong


def timed_apart(engine, rank):
    """A call that times the steps, each 100 times as long as the last by rank 0's clock."""
    engine.step_times.table, clock = None, step_timing.time
    if rank == 0:
        ticks = itertools.count()
        step_timing.time = SimpleNamespace(perf_counter=lambda: 10.0 ** next(ticks))
    tokens = engine.drawn("auto")["tokens"]
    engine.step_times.table, step_timing.time = None, clock
    return tokens


def faults(last):
    """Faults by name and rank: other options of a call, or a change; last: a call's last step.

    A pass has 14 products; a call begins with four passes over its prompts.
    """
    full = MemoryError("full")

    def product(number):
        return lambda engine: once(decoder, "linear", full, number)

    def commit(number):
        return lambda engine: once(FollowerStep, "commit", full, number)

    return {
        "temperature": {1: dict(temperature=0.5)},
        "samples": {0: dict(num_samples=4)},
        "prompts": {0: dict(prompts=[[3, 4]]), 1: dict(prompts=[[3, 5]])},
        "refused": {1: dict(top_p=2.0)},
        "refused by both": {0: dict(top_p=2.0), 1: dict(top_p=2.0)},
        "prompt on 0": {0: product(9)},
        "prompt on 1": {1: product(9)},
        "pass on 0": {0: product(79)},
        "pass on 1": {1: product(79)},
        "pass on both": {0: product(79), 1: product(79)},
        "commit on 1": {1: commit(2)},
        "last commit on 1": {1: commit(last)},
        "caches on 1": {1: lambda engine: once(engine.caches, "allocate", full)},
        "callback": {0: dict(callback=lambda *args: {}["x"])},
        "disagree": {1: lambda engine: disagree()},
    }


def failures(engine, rank):
    """Errors of calls with a fault, and whether the call behind each is as it always is."""

    def tokens(**options):
        short = dict(prompts=PROMPTS[::2], num_samples=2, max_new_tokens=8, budget=4)
        return engine.drawn("fixed", **short | options)["tokens"]

    steps = once(FollowerStep, "commit", None, 1 << 30)
    want = tokens()
    found = {}
    for name, fault in faults(len(steps) - 1).items():
        mine = fault.get(rank, {})
        # so that the call makes its caches
        engine.release()
        if callable(mine):
            mine(engine)
            mine = {}
        error = None
        try:
            tokens(**mine)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found[name] = error, tokens() == want
    return found


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # in here, because starting two processes takes longer than all they do
    main_of("tensor_parallel.py")(num_samples=2, max_new_tokens=4)
    rank = dist.get_rank()
    found = {}
    for family in SIZES:
        # the first prompt takes three chunks
        engine = Watched(build(family), max_slots=4, prefill_chunk=32)
        for case in CASES if family == "llama" else ("fixed",):
            found[f"{family}-{case}"] = engine.drawn(case)
    # rank 0's seed and stop decision count
    asked = dict(seed=5 + rank)
    if rank == 0:
        asked["until"] = lambda finished: len(finished) >= 2
    found["led"] = engine.drawn("fixed", **asked)
    torch.manual_seed(rank)
    found["drawn-seed"] = engine.drawn("fixed", seed=None)
    parted = Watched(build("llama"), max_slots=4, prefill_chunk=32)
    found["timed-apart"] = timed_apart(engine, rank)
    found["failures"] = failures(parted, rank)
    graph = corrupt(engine) if rank == 1 else None
    found["corrupted"] = engine.drawn("fixed")
    found["inserts"] = graph and graph.inserts
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
