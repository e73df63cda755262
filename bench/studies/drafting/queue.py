"""Many prompts in one batch: tokens per step, by the number of a prompt's samples drawn at once.

    python -m bench queue TRACES [--slots 32] [--together 1 2 4 8] [--nodes 16] [--history 4]
        [--prior] [--json F]

The engine itself admits, refills and drafts, with recorded samples in place of a model's. Steps
count the whole batch until the last sample has ended, and work is the number of samples in flight,
summed over steps; a model's attention would read each prompt in flight once per step. `--prior`
adds the same with a prior that learns along the run.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import csd
from bench.lib.common import finish, table
from bench.lib.forced import forced_requests, forcing
from csd.engine.call import RunSettings
from csd.engine.requests.request import Request
from csd.evaluate.replay import Recording
from csd.graph.history import PastSample
from csd.graph.prior import Prior
from csd.kernels.common.noise import prompt_key
from csd.kernels.draft import draft_tree_ref
from csd.models.fused.config import ModelConfig
from csd.models.load import Loaded
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, TOP, Verdict
from csd.traces.traces import Trace, read_traces


class NoModel:
    """Decoder without layers, whose logits are not used."""

    def __init__(self, vocab: int, context: int):
        self.config = ModelConfig(
            family="llama",
            vocab=vocab,
            hidden=1,
            intermediate=1,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=2,
            context=context,
            norm_eps=1e-5,
            rope_theta=1e4,
        )

    def forward(self, token, *rest: Any) -> torch.Tensor:
        return torch.zeros(token.shape[0], 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Watch:
    """`verify` that samples nothing, which `bench.lib.forced` fills in; records each step's sizes.

    live, rows, prompts: per step, numbers of live samples, rows, and prompts in flight.
    """

    def __init__(self) -> None:
        self.live: list[int] = []
        self.rows: list[int] = []
        self.prompts: list[int] = []

    def __call__(self, logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
        M, S = pool.rows, slots.count
        self.live.append(int(slots.live.sum()))
        self.rows.append(int((pool.slot >= 0).sum()))
        self.prompts.append(slots.group[slots.live].unique().numel())
        return Verdict(
            sample=torch.full((M,), -1, dtype=torch.int32),
            logprob=torch.zeros(M),
            raw_logprob=torch.zeros(M),
            top_token=torch.full((M, TOP), -1, dtype=torch.int32),
            top_prob=torch.zeros(M, TOP),
            accept_row=torch.full((S, ACCEPT), -1, dtype=torch.int32),
            accept_count=torch.zeros(S, dtype=torch.int32),
            finish=torch.zeros(S, dtype=torch.int32),
            bad=torch.zeros(S, dtype=torch.bool),
        )


class Posterior:
    """Drafts with the noise of the recordings, looked up by a slot's key and sample index."""

    def __init__(self, traces: list[Trace]):
        self._recordings = {
            prompt_key(t.seed, t.prompt): Recording(t, len(t.samples)) for t in traces if t.top
        }

    def draft(self, table, slots, rows, config, noise=None, out=None, nodes=None) -> Pool:
        key = slots.key.tolist()

        def posterior(slot, position, token):
            g = torch.zeros(token.shape, dtype=torch.float64)
            for s in set(slot.tolist()):
                # a slot without recorded probabilities is greedy and has no noise
                if key[s] in self._recordings:
                    here = slot == s
                    sample = slots.sample[s].expand(int(here.sum()))
                    g[here] = self._recordings[key[s]].noise(sample, position[here], token[here])
            return g

        return draft_tree_ref(table, slots, rows, config, posterior, out, nodes)


def run(
    traces: list[Trace],
    slots: int,
    together: int | None,
    nodes: int,
    history: int = 0,
    prior: bool = False,
) -> dict:
    """Draw all samples of all traces once, in an engine of `slots` slots; returns a row.

    history: number of each prompt's last samples that are not drawn but given as history.
    prior: True runs the call with a prior that learns.
    """
    requests, watch, dropped = drawn(traces, slots, together, nodes, history, prior)
    steps = len(watch.live)
    return {
        "together": together,
        "prior": prior,
        "tau": sum(job.stats.tokens for job in requests) / sum(watch.live),
        "steps": steps,
        "work": sum(watch.live),
        "samples a step": sum(watch.live) / steps,
        "rows a step": sum(watch.rows) / steps,
        "prompts a step": sum(watch.prompts) / steps,
        "contexts left out": dropped,
    }


def drawn(
    traces: list[Trace],
    slots: int,
    together: int | None,
    nodes: int,
    history: int = 0,
    prior: bool = False,
) -> tuple[list[Request], Watch, int]:
    """Like `run`, but returns the requests, the steps' sizes, and the number of dropped contexts.

    Contexts are dropped if the graph has no room for them.
    """
    past_samples = [
        [PastSample.of(s) for s in t.samples[len(t.samples) - history :]] for t in traces
    ]
    traces = [_without(t, history) for t in traces]
    # other tools' recordings have no seed; without probabilities there is no noise to couple to
    traces = [
        replace(t, seed=t.seed or i, temperature=t.temperature * bool(t.top))
        for i, t in enumerate(traces)
    ]
    vocab_size = max(max(t.prompt + s) for t in traces for s in t.samples) + 1
    longest = max(len(t.prompt) + len(s) for t in traces for s in t.samples)
    model = NoModel(vocab_size, longest + 64)
    loaded = Loaded(model, model.config, None, None, torch.device("cpu"), torch.float32)
    engine = csd.Engine(loaded, max_slots=slots, together=together)
    watch = Watch()
    engine.ops = replace(engine.ops, verify=watch, plan_attention=lambda **where: None)
    if any(t.top for t in traces):
        engine.ops = replace(engine.ops, draft_tree=Posterior(traces).draft)
    requests = forced_requests(traces)
    for request, past in zip(requests, past_samples, strict=True):
        request.history = past
    with forcing(engine, traces):
        settings = RunSettings(budget=nodes * slots, prior=Prior(learn=True) if prior else None)
        for _ in engine.run(requests, settings):
            pass
        dropped = int(engine.caches.drafter.table.dropped)
    for job, trace in zip(requests, traces, strict=True):
        if job.result().tokens != trace.samples:
            raise RuntimeError(f"trace {trace.problem!r} was not committed")
    return requests, watch, dropped


def _without(trace: Trace, last: int) -> Trace:
    """Returns the trace without its last `last` samples."""
    count = len(trace.samples) - last
    tops, indices = (x and x[:count] for x in (trace.top, trace.indices))
    return replace(trace, samples=trace.samples[:count], top=tops, indices=indices)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--together", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--nodes", type=int, default=8, help="drafted tokens a slot and step")
    parser.add_argument("--history", type=int, default=0, help="samples of a prompt known before")
    parser.add_argument("--problems", type=int, help="the first so many of each file")
    parser.add_argument("--prior", action="store_true", help="also with a prior that learns")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    by_trace = {}
    for path in args.traces:
        traces = list(read_traces(path))[: args.problems]
        name = Path(path).name.split(".jsonl")[0]
        print(f"{name}: {len(traces)} prompts, {sum(len(t.samples) for t in traces)} samples")
        rows = []
        for together, prior in product(args.together, (False, True)[: 1 + args.prior]):
            rows.append(run(traces, args.slots, together, args.nodes, args.history, prior))
            print(table(rows[-1:]), flush=True)
        by_trace[name] = rows
    result = {"bench": "queue", "slots": args.slots, "nodes": args.nodes, "history": args.history}
    finish(result | {"rows": by_trace}, args.json)


if __name__ == "__main__":
    main()
