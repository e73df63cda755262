"""Step times by number of rows, measured on empty slots, and their cache on disk.

A machine measures each kind of step once. A table is the prior of the cost model
(`csd/engine/step/budget`), which then follows measured steps. It affects how many tokens are
drafted, never which tokens are drawn. A table from a disturbed measurement is cached with a mark:
the next process that reads it measures each size once more, and the smaller times are cached. After
MEASUREMENTS a process uses the table as it is, so a machine that is always busy does not measure in
each of its processes.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch

from csd.engine.first_call.compile_loops import (
    compile_drafting,
    compile_in_parallel,
    compile_states,
    compile_verify,
)
from csd.engine.step.budget import StepTimesFile, StepTimeTable, most_nodes
from csd.engine.step.budget.estimator import OUTLIER
from csd.engine.step.static_step import StaticStep, sizes_for
from csd.engine.step.step import Step
from csd.kernels.common.cpu import compiles
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder
from csd.models.fused.held import held_weights
from csd.state.pool import Pool
from csd.utils.cache_folder import path_of, read, save
from csd.utils.check import Between
from csd.utils.device import cpu_name
from csd.utils.files import naming, parse
from csd.utils.phases import phase
from csd.utils.version import __version__

LOG = logging.getLogger("csd")


class StepTimesEntry(StepTimesFile):
    """Cached table of step times; `of` is the `step_times_key` of its steps."""

    of: str
    steady: bool
    measurements: Annotated[int, Between(1, 2**31 - 1)]


def step_times_key(decoder: Any, dtype: torch.dtype, ops: str, sizes: list[int]) -> str | None:
    """Cache key: everything that step times depend on, as text. None if there is no complete key.

    None for a user's own decoder, for a model split over processes, whose ranks measure together,
    and on a GPU.

    ops: name of the operations.
    """
    cacheable = type(decoder) is Decoder and isinstance(decoder.config, ModelConfig)
    if not cacheable or decoder.embedding.device.type != "cpu":
        return None
    isa = code = None
    if compiles():
        from csd.kernels import cpu_ops
        from csd.kernels.layers.quantized.cpu import product as packed
        from csd.kernels.numba.jit import stamp

        isa = cpu_ops.instruction(dtype)
        code = [stamp(Path(str(module.__file__))) for module in (cpu_ops, packed)]
    layer, product = decoder.layers[0], getattr(decoder.linear, "product", decoder.linear)
    # a layer of experts has None here
    feed_forward = (w for w in (layer.gate_up, layer.down) if w is not None)
    weights = (layer.qkv, layer.out, *feed_forward, decoder.head)
    held = held_weights(decoder)
    assert held is not None
    parts = {
        "fields": sorted(StepTimesEntry.__annotations__),
        "csd": __version__,
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "ops": ops,
        # a new version of a loop takes other times
        "loops": code,
        "instruction": isa,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "model": asdict(decoder.config),
        # packed weights take other times than plain weights
        "weights": [(str(w.layout), str(w.dtype), w.dim()) for w in weights],
        # and quantised ones others again, by their types
        "held": [held.kinds, held.bytes],
        "product": getattr(product, "__qualname__", type(product).__qualname__),
        "taps": decoder.taps,
        "sizes": sizes,
    }
    return json.dumps(parts, sort_keys=True)


def load_step_times(key: str) -> StepTimeTable | None:
    """The cached table for a key; None, with a warning unless it is absent, if not usable."""
    try:
        path = path_of("steps", key)
        data = read(path)
        with naming(f"{path}"):
            entry = parse(data, StepTimesEntry)
            if entry["of"] != key:
                raise ValueError("has the times of other steps")
            marks = entry["steady"], entry["measurements"]
            return StepTimeTable(entry["rows"], entry["seconds"], *marks)
    except FileNotFoundError:
        return None
    # a user may have no home
    except (OSError, RuntimeError, ValueError) as error:
        LOG.warning("step times are measured again: %s", error)
        return None


def save_step_times(key: str, table: StepTimeTable) -> None:
    """Cache a table, with the mark of a disturbed measurement."""
    entry: StepTimesEntry = {
        "of": key,
        "rows": table.sizes,
        "seconds": table.seconds,
        "steady": table.steady,
        "measurements": table.measurements,
    }
    try:
        save(path_of("steps", key), json.dumps(entry))
    except (OSError, RuntimeError) as error:
        LOG.warning("step times cannot be cached, so each process measures its own: %s", error)


# a step that takes more than this many times the smallest step's time is never worth its drafts
NOT_WORTH = 6.0


def refined(before: StepTimeTable, again: StepTimeTable) -> StepTimeTable:
    """The smaller time of each size of two measurements.

    It is steady if `again` is, or if the two agree: disturbances only add, and differ each time.
    """
    times: dict[int, list[float]] = {}
    for table in (before, again):
        for size, seconds in zip(table.sizes, table.seconds, strict=True):
            times.setdefault(size, []).append(seconds)
    agree = all(max(seconds) < OUTLIER * min(seconds) for seconds in times.values())
    sizes = sorted(times)
    smallest = [min(times[size]) for size in sizes]
    count = before.measurements + again.measurements
    return StepTimeTable(sizes, smallest, again.steady or agree, count)


def sizes_to_time(max_slots: int, static: bool) -> list[int]:
    """Pool sizes to time for an engine of `max_slots` slots; static: for a GPU's static steps."""
    if static:
        return sizes_for(max_slots)
    # a CPU's product loop has accumulators for 14 and for 28 rows
    # (`csd/kernels/layers/cpu/linear.py`)
    sizes = [1, 2, 4, 8, 14, 16, 28, 32, 48, 64, 96, 128]
    return [size for size in sizes if size <= max_slots + most_nodes(max_slots)]


def compile_loops(step: Step, sizes: list[int]) -> None:
    """Compile a CPU step's loops, or load them from the cache, for any number of threads.

    Otherwise a call's first steps would compile them, and the cost model would fit those times.
    """
    step.drafting = False
    step.slots.group.zero_()
    # loops have the same code for any number of rows; fewer rows take less time
    dtype, rows = step.cache.dtype, sizes[1]
    name = str(dtype).removeprefix("torch.")
    line = f"compiling or loading kernels in {name}, for any number of threads"
    with phase(line, None, kind="compile"):
        with compile_in_parallel(dtype, step.decoder.config.vocab, rows):
            logits = step.forward(_roots(step, rows))
        compile_verify(step.ops, step.slots, logits, _roots(step, rows))
        compile_drafting(step.ops, dtype, step.slots.logprobs.dtype)
        if step.cache.states is not None:
            compile_states(step.ops, step.cache.states.slots)


def _roots(step: Step, rows: int) -> Pool:
    slots = step.slots
    index = torch.arange(slots.count, device=slots.live.device)
    slots.live.copy_(index < rows)
    # different tokens: rows of one token would all read the same few experts
    slots.context[:, 0] = index % step.decoder.config.vocab
    return step.ops.roots(slots, rows)


def time_graphs(step: StaticStep, sizes: list[int]) -> StepTimeTable:
    """Seconds of the step's own graphs without drafts at each size; the call reuses the graphs.

    No slot is live, so all rows are padding: their products take the usual time, their attention
    and verification none.
    """
    device = step.slots.live.device
    graphs = {rows: step.captured(rows, 0)[0] for rows in sizes}

    def timed(rows: int) -> None:
        graphs[rows].replay()
        # not the whole device: another thread's capture would fail
        torch.cuda.current_stream().synchronize()

    with step.without_live(), phase("measuring step times", device):
        return measure(timed, sizes)


def time_steps(
    step: Step, sizes: list[int], worth: float = NOT_WORTH, repeats: int = 3
) -> StepTimeTable:
    """Seconds of forward and verify at each size, with as many slots as the largest size.

    No slot has a token to draw, so a CPU verifies few rows: its loops verify accepted paths only.

    worth: on a CPU, sizes after the first that takes `worth` times the smallest are left out.
    """
    slots, device = step.slots, step.slots.live.device
    step.drafting = False
    slots.group.zero_()

    def run(rows: int) -> None:
        pool = _roots(step, rows)
        step.ops.verify(step.forward(pool), pool, slots)

    if device.type != "cuda":
        # compile before timing
        compile_loops(step, sizes)
        with phase("measuring step times", device, kind="measure"):
            with with_faster_threads(lambda: run(sizes[1])) as others_compete:
                table = measure(run, sizes, repeats, worth)
            return StepTimeTable(table.sizes, table.seconds, table.steady and not others_compete)

    def timed(rows: int) -> None:
        run(rows)
        torch.cuda.current_stream().synchronize()

    # compile before timing
    with phase("compiling kernels of a step", None, kind="compile"):
        for rows in sizes:
            timed(rows)
    with phase("measuring step times", device, kind="measure"):
        return measure(timed, sizes, repeats)


# with all threads a step of a machine that other processes use takes many times as long
FASTER = 2.0


@contextmanager
def with_faster_threads(run: Callable[[], None]) -> Iterator[bool]:
    """Context with one thread if `run` then takes 1 / FASTER of its time; True if so, else False.

    Otherwise the steps of a busy machine are measured for a minute, with threads that wait for one
    another, and the calls themselves use one (`csd/engine/step/thread_choice.py`).
    """
    threads, took = torch.get_num_threads(), {}
    try:
        for number in sorted({1, threads}):
            torch.set_num_threads(number)
            # threads that sleep start
            run()
            start = time.perf_counter()
            run()
            took[number] = time.perf_counter() - start
        competing = took[threads] > FASTER * took[1]
        torch.set_num_threads(1 if competing else threads)
        yield competing
    finally:
        torch.set_num_threads(threads)


# seconds after which no further size is timed, but for the first FEWEST: steps of a busy machine
# take long
LONGEST, FEWEST = 5.0, 4


def measure(
    run: Callable[[int], None], sizes: list[int], repeats: int = 3, worth: float = math.inf
) -> StepTimeTable:
    """Time `run(rows)` for every size, alternating sizes; returns the minimum of each size.

    Other load on the machine only adds time, and alternation spreads it evenly over the sizes.

    worth: sizes after the first that takes `worth` times the smallest are left out, and the
    measurement ends after about LONGEST seconds; with inf it never depends on its own times. A
    table with a size that was timed once is not steady.
    """
    begun, longest = time.perf_counter(), LONGEST if worth < math.inf else math.inf
    times: dict[int, list[float]] = {size: [] for size in sizes}

    def time_once(size: int) -> None:
        start = time.perf_counter()
        run(size)
        times[size].append(time.perf_counter() - start)

    def too_long(size: int) -> bool:
        return len(times) > 2 and min(times[size]) > worth * min(times[sizes[0]])

    for size in (sizes[0], sizes[1]):
        run(size)
    for _ in range(repeats):
        for size in [*times]:
            done = sum(map(bool, times.values()))
            if time.perf_counter() - begun > longest and done >= FEWEST:
                break
            time_once(size)
            if too_long(size):
                # measure again: another process may have caused the delay
                time_once(size)
            if too_long(size):
                times = {m: t for m, t in times.items() if m <= max(size, sizes[1])}
                break
    times = {size: seconds for size, seconds in times.items() if seconds}
    two_best = [sorted(t)[:2] for t in times.values()]
    steady = all(len(t) > 1 and t[1] < OUTLIER * t[0] for t in two_best)
    return StepTimeTable([*times], [min(t) for t in times.values()], steady)
