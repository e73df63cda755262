"""What drafting would gain on recorded samples: replayed steps, and what a step costs."""

import torch

from csd.cost import CostModel
from csd.graph.drafters import make_drafter
from csd.kernels.ops import reference
from csd.replay import replay
from csd.traces import Trace

# seconds of a step by its rows, caches empty: SmolLM2-135M in float32 on 2 CPU cores, from
# `python -m bench.step_times` (bench/results/step_times.json)
ROWS = [1, 2, 4, 8, 16, 32, 64, 128]
SECONDS = [0.041, 0.045, 0.049, 0.056, 0.074, 0.106, 0.176, 0.353]


def gain(
    traces: list[Trace],
    nodes: int,
    cost: CostModel,
    samples: int | None = None,
    drafter: str = "consensus",
) -> dict:
    """Figures of all traces together, with `nodes` drafted tokens a sample and step at most.

    samples: of each trace, all when None. Returns nodes; tau; nodes_used, what was drafted of them;
    speedup, over one token a step, by `cost` alone: the drafter's own time is not in it.
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
        lengths = [len(x) for x in trace.samples[:count]]
        in_flight = (sum(x > i for x in lengths) for i in range(max(lengths)))
        plain += sum(cost(n) for n in in_flight)
        drafting += sum(cost(live + more) for live, more in result.rows)
    return {
        "nodes": nodes,
        "tau": tokens / steps,
        "nodes_used": drafted / steps,
        "speedup": plain / drafting,
    }
