"""Times what a step costs by its rows, on slots that hold nothing."""

import math
import time
from collections.abc import Callable

import torch

from csd.engine.budget import StepTimeTable, most_nodes
from csd.engine.budget.estimator import OUTLIER
from csd.engine.compile_beside import compiled_beside
from csd.engine.compile_step import compile_rest, compile_states, compile_verify
from csd.engine.cuda_graphs import Captures
from csd.engine.static_step import sizes_for
from csd.engine.step import Step
from csd.state.phases import phase
from csd.state.pool import Pool

# a step that takes so many times the smallest is never worth its drafts
NOT_WORTH = 6.0


def sizes_to_time(max_slots: int, captured: bool) -> list[int]:
    """Rows of the pools that an engine of `max_slots` slots times; captured: the ones it runs."""
    if captured:
        return sizes_for(max_slots)
    # 14 rows and twice as many are what a CPU's loop of products has sums for (csd/cpu)
    sizes = [1, 2, 4, 8, 14, 16, 28, 32, 48, 64, 96, 128]
    return [size for size in sizes if size <= max_slots + most_nodes(max_slots)]


def compile_loops(step: Step, sizes: list[int]) -> None:
    """Compiles what steps run on a CPU, or reads it where it is kept: for one thread, for several.

    Else a call's first steps would compile it, and their times would be taken for those of steps.
    """
    step.drafting = False
    step.slots.group.zero_()
    dtype, few_and_many = step.cache.dtype, [sizes[0], sizes[-1]]
    with compiled_beside(dtype, step.decoder.config.vocab, few_and_many):
        logits = [step.forward(_roots(step, rows)) for rows in few_and_many]
    for x in logits:
        compile_verify(step.ops, step.slots, x, _roots(step, x.shape[0]))
    compile_rest(step.ops, dtype, step.slots.logprobs.dtype)
    if step.cache.states is not None:
        compile_states(step.ops, step.cache.states.slots)


def _roots(step: Step, rows: int) -> Pool:
    slots = step.slots
    place = torch.arange(slots.count, device=slots.live.device)
    slots.live.copy_(place < rows)
    # rows of one token would read the same few experts
    slots.context[:, 0] = place % step.decoder.config.vocab
    return step.ops.roots(slots, rows)


def time_steps(
    step: Step, sizes: list[int], captured: bool, worth: float = NOT_WORTH
) -> StepTimeTable:
    """Seconds of forward and verify at each size, of a step with as many slots as the largest.

    No slot has a token to draw: of a pool's rows, a CPU's loops verify those of accepted paths.
    worth: on a CPU sizes beyond the first that takes so many times the smallest are left out.
    """
    slots, device = step.slots, step.slots.live.device
    step.drafting = False
    slots.group.zero_()

    def run(rows: int) -> None:
        pool = _roots(step, rows)
        step.ops.verify(step.forward(pool), pool, slots)

    if device.type != "cuda":
        # before anything is timed
        compile_loops(step, sizes)
        with phase("measure steps", device):
            return measure(run, sizes, worth=worth)
    captures = Captures()

    def timed(rows: int) -> None:
        if captured:
            captures.get(rows, lambda: run(rows))[0].replay()
        else:
            run(rows)
        torch.cuda.synchronize()

    # what is compiled or captured is so before anything is timed
    for rows in sizes:
        timed(rows)
    with phase("measure steps", device):
        return measure(timed, sizes)


def measure(
    run: Callable[[int], None], sizes: list[int], repeats: int = 3, worth: float = math.inf
) -> StepTimeTable:
    """Times `run(rows)` for every size, the sizes in turn, and keeps the least: the time that a
    busy machine adds does not depend on the size.

    worth: sizes beyond the first that takes so many times what the smallest does are left out.
    """
    times: dict[int, list[float]] = {size: [] for size in sizes}

    def again(size: int) -> None:
        start = time.perf_counter()
        run(size)
        times[size].append(time.perf_counter() - start)

    def too_long(size: int) -> bool:
        return len(times) > 2 and min(times[size]) > worth * min(times[sizes[0]])

    for size in (sizes[0], sizes[1]):
        run(size)
    for _ in range(repeats):
        for size in [*times]:
            again(size)
            if too_long(size):
                # once more, for something else may have taken the time
                again(size)
            if too_long(size):
                times = {m: found for m, found in times.items() if m <= max(size, sizes[1])}
                break
    twice = [sorted(found)[:2] for found in times.values()]
    steady = all(found[-1] < OUTLIER * found[0] for found in twice)
    return StepTimeTable([*times], [min(found) for found in times.values()], steady)
