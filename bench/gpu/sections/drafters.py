"""Drafters in one engine on the same traces: wall clock, tau, and time spent drafting.

`drafting_us_a_step` is an upper bound: steps are eager, with a synchronisation before and after the
drafter, so it includes launches, which a captured step does not have.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import csd
from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import engine_of, forced, forcing, groups, recorded, shapes
from bench.lib.shapes import random_model
from csd.graph.drafter import Drafter
from csd.graph.registry import make_drafter

SAMPLES = 16
BUDGET = 128
# tokens per sample of the warm-up run
WARM = 8


class Timed(Drafter):
    """Drafter whose proposals and insertions are timed, including the device's work."""

    def __init__(self, drafter, section: Section):
        self._drafter, self._section = drafter, section
        self.context = drafter.context
        self.seconds = 0.0

    def observe_prompt(self, *args) -> int:
        results = []
        self.seconds += self._section.clock(
            lambda: results.append(self._drafter.observe_prompt(*args))
        )
        return results[0]

    def propose(self, *args):
        results = []
        self.seconds += self._section.clock(lambda: results.append(self._drafter.propose(*args)))
        return results[0]

    def insert(self, *args, defer: bool = False) -> None:
        self.seconds += self._section.clock(lambda: self._drafter.insert(*args))


def run(section: Section) -> None:
    traces = recorded(section)
    name, config = next(iter(shapes(section).items()))
    samples, prompt_tokens = (SAMPLES, 1024) if section.cuda else (4, 64)
    picked = groups(traces, samples)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.npy"
        others = [t for t in traces if t.problem != picked[0].problem]
        np.save(store, np.array([t for x in others for s in x.samples for t in (*s, -1)] or [-1]))
        names = ("consensus", "prompt-lookup", "suffix", "paper", f"rest:{store}")
        engine = engine_of(section, config, max_slots=samples)
        with engine, forcing(engine, picked):
            for drafter in names:
                measure(section, engine, name, picked, prompt_tokens, drafter)
        del engine
    one_layer(section, name, config, samples)


def measure(section: Section, engine, shape, picked, prompt_tokens: int, name: str) -> None:
    """Add the row of one drafter: eager steps, the same budget and the traces' tokens for all."""
    made: list[Timed] = []

    def make(ops, device):
        made.append(Timed(make_drafter(name, ops, device), section))
        return made[-1]

    label = name.split(":")[0]
    options = dict(drafter=make, budget=BUDGET)
    run = forced(engine, picked, prompt_tokens, **options)
    # a few steps as a warm-up
    short = [replace(t, samples=[s[:WARM] for s in t.samples]) for t in picked]
    results = []
    try:
        if section.cuda:
            forced(engine, short, prompt_tokens, **options)()
        before = sum(drafter.seconds for drafter in made)
        seconds = section.clock(lambda: results.extend(run()))
    except ImportError as error:
        section.skip(f"drafter {label}: {error}")
        return
    stats = [out.stats for out in results]
    steps = max(s.steps for s in stats)
    section.add(
        shape=shape,
        drafter=label,
        N=sum(len(t.samples) for t in picked),
        tau=sum(s.tokens for s in stats) / sum(s.sample_steps for s in stats),
        seconds=seconds,
        steps=steps,
        drafting_us_a_step=(sum(drafter.seconds for drafter in made) - before) / steps * 1e6,
    )


def one_layer(section: Section, shape: str, config, samples: int) -> None:
    """Latency of a draft model: two hidden states to one, one layer, head and sampling."""
    dtype = section.dtype
    made = random_model(replace(config, layers=1), section.device, dtype)
    join = torch.randn(config.hidden, 2 * config.hidden, dtype=dtype, device=section.device)
    state = torch.randn(samples, 2 * config.hidden, dtype=dtype, device=section.device)
    prompt, levels = list(range(64)), 32 if section.cuda else 4
    with csd.Engine(made, max_slots=samples, self_check=False) as engine:

        def draw(new: int) -> None:
            engine.generate(
                prompt,
                num_samples=samples,
                max_new_tokens=new,
                temperature=0.7,
                seed=1,
                speculate=False,
                ignore_eos=True,
            )

        draw(levels)
        whole = min(section.clock(lambda: draw(levels + 1)) for _ in range(3))
        first = min(section.clock(lambda: draw(1)) for _ in range(3))
    joined = min(section.clock(lambda: F.linear(state, join)) for _ in range(5))
    section.add(
        shape=shape,
        drafter="one EAGLE layer, latency only",
        N=samples,
        us_a_level=((whole - first) / levels + joined) * 1e6,
    )
