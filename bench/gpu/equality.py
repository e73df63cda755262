"""The share of tokens that are equal with and without speculation: no traces, the model's own."""

import torch

import csd
from bench.gpu.section import Section
from bench.gpu.workload import model, recorded, shapes

SAMPLES, NEW = 8, 128


def run(section: Section) -> None:
    """bfloat16 on a GPU, where rounding depends on the number of rows; float32 on a CPU."""
    samples, new = (SAMPLES, NEW) if section.cuda else (2, 12)
    for name, config in shapes(section).items():
        with csd.Engine(model(section, config), max_slots=samples) as engine:
            for trace in recorded(section)[:3]:
                if section.left <= 0:
                    return
                plain, drafted, again = (
                    engine.generate(
                        trace.prompt, num_samples=samples, max_new_tokens=new, temperature=0.7,
                        seed=1, budget=32, speculate=speculate,
                    )
                    for speculate in (False, True, True)
                )  # fmt: skip
                section.add(shape=name, prompt=trace.problem, dtype=str(engine.dtype),
                            **compared(plain, drafted),
                            same_again=drafted.tokens == again.tokens)  # fmt: skip
        del engine
        if section.cuda:
            torch.cuda.empty_cache()


def compared(plain, drafted) -> dict:
    """Tokens before each sample's first difference, and samples without one."""
    total = equal = whole = 0
    for a, b in zip(plain.tokens, drafted.tokens, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        total, equal, whole = total + len(a), equal + first, whole + (a == b)
    return {"equal_tokens": equal / total, "equal_samples": whole / len(plain)}
