"""Expected speed-up of drafting on recorded samples: replayed steps times the cost of a step."""

import torch

from csd.engine.step.budget import StepTimeTable
from csd.evaluate.replay import replay
from csd.graph.drafter_registry import make_drafter
from csd.kernels.ops import reference
from csd.traces.traces import Trace


def gain(
    traces: list[Trace],
    nodes: int,
    cost: StepTimeTable | None,
    samples: int | None = None,
    drafter: str = "consensus",
) -> dict:
    """Figures of all traces together, with at most `nodes` drafted tokens per sample and step.

    samples: number of samples per trace; None: all. Returns nodes; tau; nodes_used, the mean
    number drafted per sample and step; speedup, relative to one token per step, computed from
    `cost` without the drafter's own time, or None without a cost.
    """
    tokens = steps = drafted = 0
    plain = drafting = 0.0
    for trace in traces:
        count = len(trace.samples) if samples is None else samples
        result = replay(
            trace, make_drafter(drafter, reference(), torch.device("cpu")), count, nodes
        )
        tokens, steps = tokens + result.tokens, steps + result.sample_steps
        drafted += result.nodes
        if cost is None:
            continue
        lengths = [len(x) for x in trace.samples[:count]]
        in_flight = (sum(x > i for x in lengths) for i in range(max(lengths)))
        plain += sum(cost(n) for n in in_flight)
        drafting += sum(cost(live + more) for live, more in result.rows)
    return {
        "nodes": nodes,
        "tau": tokens / steps,
        "nodes_used": drafted / steps,
        "speedup": plain / drafting if cost is not None else None,
    }
