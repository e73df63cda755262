"""One of two processes that share a model: tensor_parallel_rank.py FOLDER, under torchrun."""

import json
import runpy
import sys
from pathlib import Path

import checkpoints
import torch
import torch.distributed as dist

import csd
from csd.graph.drafters import make_drafter
from csd.integrations.tensor_parallel import FollowerStep, ParallelEngine

PROMPTS = [[5, 17, 3, 60, 17, 3, 9] * 12, [8], [44, 2, 44, 7]]
SIZES = {
    "llama": {},
    "qwen2": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=12),
    "qwen3": {},
}
CASES = {
    "fixed": dict(budget=16, temperature=0.9),
    "auto": dict(budget="auto", temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    "none": dict(speculate=False, temperature=1.0, top_k=20),
}


def build(family):
    return checkpoints.build(family, dtype=torch.float64, **SIZES[family])


def draw(engine, case, **options):
    options = dict(num_samples=3, max_new_tokens=20, seed=4, **CASES[case]) | options
    return csd.generate(engine, PROMPTS, **options)


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
    graph = make_drafter("consensus", engine._ops, engine.device)
    insert, propose = graph.insert, FollowerStep.propose

    def wrong_insert(pool, slots, verdict):
        insert(pool, slots, verdict)
        token = graph.table.succ_token
        token.copy_(torch.where(token >= 0, (token * 31 + 7) % 97, -1))
        graph.inserts = getattr(graph, "inserts", 0) + 1

    def with_graph(self, live, budget):
        self.drafter, self.drafting = graph, True
        return propose(self, live, budget)

    graph.insert, FollowerStep.propose = wrong_insert, with_graph
    return graph


def disagree(engine):
    """Rank 1 commits something else: the next step must say so."""
    commit = FollowerStep.commit

    def wrong(self, verdict):
        commit(self, verdict)
        self.slots.context[0, 0] += 1

    FollowerStep.commit = wrong


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # in here, because starting two processes takes longer than all they do
    example = Path(__file__).parent.parent / "examples" / "tensor_parallel.py"
    runpy.run_path(str(example))["main"](num_samples=2, max_new_tokens=4)
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
    graph = corrupt(engine) if rank == 1 else None
    found["corrupted"] = engine.drawn("fixed")
    found["inserts"] = graph and graph.inserts
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    # the last thing these processes do: one of them fails
    if rank == 1:
        disagree(engine)
    try:
        engine.drawn("fixed")
    except RuntimeError as error:
        Path(folder, f"{rank}.error").write_text(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
