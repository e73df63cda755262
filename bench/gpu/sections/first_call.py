"""Duration of a first call; host and device time and memory of a step, compared to predictions.

An engine's first call measures, captures and allocates; a later call captures graphs for pool sizes
that it is the first to choose. A call that adds no graph is warm. If the host's milliseconds per
step equal the device's, launches are the bottleneck.
"""

import time
from dataclasses import asdict

import torch

from bench.gpu.lib.phases import device_seconds
from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import engine_of, shapes

SAMPLES = (16, 64)
PROMPT, NEW = 200, 128
# most calls until one is warm
MOST = 8


def run(section: Section) -> None:
    name, config = next(iter(shapes(section).items()))
    samples, prompt, new = (SAMPLES, PROMPT, NEW) if section.cuda else ((2,), 20, 4)
    ids = torch.randint(
        config.vocab, (prompt,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    made = []
    seconds = section.clock(lambda: made.append(engine_of(section, config, max_slots=max(samples))))
    section.add(shape=name, what="model and engine", seconds=seconds)
    with made.pop() as engine:
        for n in samples:
            if section.left <= 0:
                section.cut_off(f"N={n}")
                continue

            def draw(n=n):
                return engine.generate(
                    ids,
                    num_samples=n,
                    max_new_tokens=new,
                    temperature=0.7,
                    seed=1,
                    ignore_eos=True,
                )

            section.add(shape=name, N=n, **calls(section, engine, draw))


def calls(section: Section, engine, draw) -> dict:
    """Seconds of the first call and of later ones, graphs, milliseconds per step, and memory."""
    weights = 0
    if section.cuda:
        torch.cuda.reset_peak_memory_stats(section.device)
        weights = torch.cuda.memory_allocated(section.device)
    outs: list = []
    seconds, graphs, busy = [], [0], 0.0
    while len(seconds) < 2 or (graphs[-1] > graphs[-2] and len(seconds) < MOST):
        begun = time.process_time()
        seconds.append(section.clock(lambda: outs.append(draw())))
        busy = time.process_time() - begun
        graphs.append(len(engine.captured))
    steps = outs[-1].stats.steps
    row = {
        "cold_seconds": seconds[0],
        "warm_seconds": seconds[-1],
        "seconds": seconds,
        "graphs": graphs[1:],
        "steps": steps,
        "wall_ms_a_step": 1e3 * seconds[-1] / steps,
        "host_cpu_ms_a_step": 1e3 * busy / steps,
    }
    if (demand := engine.caches.demand) is not None:
        row["predicted_bytes"] = asdict(demand) | {"total": demand.total}
    if section.cuda:
        peak = torch.cuda.max_memory_allocated(section.device)
        row |= {"bytes_before": weights, "peak_bytes_beyond": peak - weights}
        spent = sum(device_seconds(draw).values())
        row["device_ms_a_step"] = 1e3 * spent / steps
    return row
