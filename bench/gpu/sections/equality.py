"""Share of tokens that are equal with and without speculation, for the model's own tokens.

With `exact=True` all must be equal, at every budget. The section also times the products of exact
rows: Triton's, and cuBLAS's in blocks of 64 rows, compared to cuBLAS's at the actual number of
rows.
"""

import torch

import csd
from bench.gpu.lib.exact_products import price
from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import engine_of, recorded, shapes

SAMPLES, NEW = 8, 128
BUDGETS = (0, 16, 32, "auto")
# the one budget of engines without exact rows, and of calls of a lent GPU, and their prompts
BUDGET, PROMPTS = 32, 3


def run(section: Section) -> None:
    """Run in bfloat16 on a GPU, where rounding depends on the number of rows, else in float32.

    Raises AssertionError at the end if tokens differ with `exact=True`.
    """
    samples, new = (SAMPLES, NEW) if section.cuda else (2, 12)
    for name, config in shapes(section).items():
        for exact in (True, False):
            with engine_of(section, config, max_slots=samples, exact=exact) as engine:
                for trace in recorded(section)[: 1 if exact or section.call else PROMPTS]:
                    if section.left > 0:
                        compare(section, engine, name, trace, samples, new)
                    else:
                        section.cut_off(f"{name}, exact={exact}, prompt {trace.problem}")
            del engine
            if section.cuda:
                torch.cuda.empty_cache()
    if section.cuda:
        price(section)
    else:
        section.skip("what exact products cost: cuBLAS needs a GPU")
    wrong = [r for r in section.rows if r.get("exact") and r["equal_samples"] < 1]
    assert not wrong, f"with exact=True tokens differ: {wrong}"


def compare(section: Section, engine: csd.Engine, name: str, trace, samples: int, new: int) -> None:
    """Add one row per budget, compared to the same samples without drafts."""
    budgets = BUDGETS if engine.exact and not section.call else (BUDGET,)

    def draw(**how):
        return engine.generate(
            trace.prompt, num_samples=samples, max_new_tokens=new, temperature=0.7, seed=1, **how
        )

    plain = draw(speculate=False)
    for budget in budgets:
        drafted, again = draw(budget=budget), draw(budget=budget)
        section.add(
            shape=name,
            prompt=trace.problem,
            dtype=str(engine.dtype),
            budget=budget,
            exact=engine.exact,
            **compared(plain, drafted),
            same_again=drafted.tokens == again.tokens,
        )


def compared(plain, drafted) -> dict:
    """Numbers of tokens before each sample's first difference, and of equal samples."""
    total = equal = whole = 0
    for a, b in zip(plain.tokens, drafted.tokens, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        total, equal, whole = total + len(a), equal + first, whole + (a == b)
    return {"equal_tokens": equal / total, "equal_samples": whole / len(plain)}
