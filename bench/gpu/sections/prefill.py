"""Prefill of many short prompts, as in a step of reinforcement learning, and of one long prompt."""

import statistics

import torch

from bench.gpu.lib.roofline import measure, step_seconds
from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import engine_of, shapes

# (number of prompts, tokens of each)
JOBS = ((64, 200), (1, 8192), (1, 200))
REPEATS = 3


def run(section: Section) -> None:
    """Add one row per job: seconds until each prompt has one token, and their lower bound."""
    rates = measure(section.device)
    name, config = next(iter(shapes(section).items()))
    with engine_of(section, config, max_slots=64) as engine:
        for count, tokens in JOBS if section.cuda else ((4, 20),):
            if section.left <= 0:
                section.cut_off(f"{count} prompts of {tokens} tokens")
                continue
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(config.vocab, (count, tokens), generator=generator).tolist()

            def read(prompts=prompts) -> None:
                engine.generate(
                    prompts,
                    num_samples=1,
                    max_new_tokens=1,
                    temperature=0.7,
                    seed=1,
                    speculate=False,
                )

            read()
            seconds = statistics.median(section.clock(read) for _ in range(REPEATS))
            least = step_seconds(
                config,
                rows=count * tokens,
                live=1,
                prompts=[1],
                context=tokens / 2,
                itemsize=engine.dtype.itemsize,
                **rates,
            )
            section.add(
                shape=name,
                prompts=count,
                tokens=tokens,
                seconds=seconds,
                tokens_per_second=count * tokens / seconds,
                roofline_seconds=least,
            )
