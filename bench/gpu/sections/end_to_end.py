"""Whole generations of both shapes with tokens from traces, speculation alternately on and off.

The steps of both sides also replace their samples by the recorded ones, with some forty small
launches within the graph: `step ms` and the roofline share include them, as phase `other`.
"""

import warnings
from collections.abc import Callable

import torch

from bench.gpu.lib.figures import against_roofline, figures
from bench.gpu.lib.phases import phases
from bench.gpu.lib.roofline import measure
from bench.gpu.lib.section import Section
from bench.gpu.lib.timed import shortened, timed
from bench.gpu.lib.workload import engine_of, forced, forcing, groups, recorded, shapes

# numbers of samples in the order of their importance; MORE: additional ones of a long run
SAMPLES, MORE = (16, 64, 1, 4, 256), (32, 8, 128)
# each pair has a new prompt, as long as there are any; 16 samples have up to twenty pairs, if there
# is time, and twice the time of other numbers
PAIRS, MOST_PAIRS = 5, {16: 20}
# share of the box for profiles
SPARE = 0.08


def run(section: Section) -> None:
    section.facts["device rates"] = rates = measure(section.device)
    traces = recorded(section)
    if section.cuda:
        wanted, prompt_tokens = SAMPLES + (MORE if section.minutes >= 30 else ()), 1024
        if section.call:
            wanted = SAMPLES[:4]
    else:
        wanted, prompt_tokens = (4, 1), 128
    pairs = {n: MOST_PAIRS.get(n, PAIRS) if section.cuda else 1 for n in wanted}
    section.facts["prompt tokens"] = prompt_tokens
    named = shapes(section)
    last = list(named)[-1]
    # seconds reserved for profiles
    spare = section.left * SPARE if section.cuda else 0.0
    for i, (name, config) in enumerate(named.items()):
        # each shape gets an equal part of the remaining time
        end = section.left - (section.left - spare) / (len(named) - i)

        def rows(engine, name=name, end=end) -> None:
            for j, n in enumerate(wanted):
                if section.left <= end:
                    section.cut_off(f"{name}, N={n}")
                    continue
                parts = [2 if m in MOST_PAIRS else 1 for m in wanted[j:]]
                until = section.left - (section.left - end) * parts[0] / sum(parts)
                measure_one(section, engine, name, traces, n, pairs[n], prompt_tokens, rates, until)
            if name == last:
                profile(section, engine, name, traces, prompt_tokens)

        with_engine(section, config, traces, wanted, rows)
    for name, config in list(named.items())[:-1]:
        if section.left > 0:
            with_engine(
                section,
                config,
                traces,
                wanted,
                lambda engine, name=name: profile(section, engine, name, traces, prompt_tokens),
            )


def with_engine(section: Section, config, traces, wanted, use: Callable) -> None:
    """Call `use` with an engine that commits the traces, then free the engine.

    One `forcing` covers all rows, since captured graphs refer to its tables.
    """
    with engine_of(section, config, max_slots=max(wanted)) as engine, forcing(engine, traces):
        use(engine)
    del engine
    if section.cuda:
        torch.cuda.empty_cache()


def profile(section: Section, engine, name: str, traces, prompt_tokens: int) -> None:
    """Add milliseconds of a step by phase to a shape's rows, as long as there is time.

    Nothing is timed after the profiler has run, since it may keep slowing launches.
    """
    for row in section.rows:
        if row["shape"] == name and section.left > 0:
            picked = shortened(groups(traces, row["N"]))
            row["phases ms"] = phases(section, engine, picked, prompt_tokens)
            section.write("running")


def measure_one(section, engine, name, traces, n, pairs, prompt_tokens, rates, until):
    """Add one row: N samples, at most `pairs` pairs of runs, each on another prompt if possible."""
    seconds = {True: [], False: []}
    runs = []
    if section.cuda:
        torch.cuda.reset_peak_memory_stats()
    sets = [groups(traces, n, turn) for turn in range(pairs)]
    if sum(len(t.samples) for t in sets[0]) < n:
        section.skip(f"{name}, N={n}: the traces hold fewer samples")
        return
    # warm-up: capture graphs, measure costs and compile kernels before the timing
    for speculate in (True, False):
        forced(engine, sets[0], prompt_tokens, speculate=speculate)()
    for turn, picked in enumerate(sets):
        for speculate in (True, False) if turn % 2 else (False, True):
            run = forced(engine, picked, prompt_tokens, speculate=speculate)
            took, results = timed(section, engine, run)
            seconds[speculate].append(took)
            runs.append(results)
        if section.left <= until:
            break
    prompts = prefill(section, engine, sets[0], prompt_tokens)
    row = {
        "shape": name,
        "N": n,
        "prompts": len(sets[0]),
        "pairs": len(seconds[True]),
    } | figures(seconds, runs)
    row |= against_roofline(engine, row, sets[0], prompt_tokens, prompts, rates)
    if section.cuda:
        row |= waits(forced(engine, shortened(sets[0]), prompt_tokens, speculate=True))
    if section.cuda:
        row["peak memory GB"] = torch.cuda.max_memory_allocated() / 1e9
    section.add(**row)


def prefill(section: Section, engine, picked, prompt_tokens: int) -> float:
    """Seconds until every sample has its first token."""
    once = forced(engine, shortened(picked, 1), prompt_tokens, speculate=False)
    once()
    return section.clock(once)


def waits(run) -> dict:
    """Number of synchronising calls that torch reports in one more run, without event waits."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronisations = sum("synchroniz" in str(w.message) for w in caught)
    steps = max(out.stats.steps for out in results)
    return {
        "synchronisations": synchronisations,
        "synchronisations a step": synchronisations / steps,
    }
