"""Whole generations of both shapes, speculation on and off alternated, tokens from traces.

Both sides' steps also replace their samples by the recorded ones, some forty small launches within
the graph: `step ms` and the roofline share carry them, as `other` of the phases.
"""

import statistics
import warnings
from dataclasses import replace

import torch

import csd
from bench.common import bootstrap
from bench.gpu.phases import device_seconds
from bench.gpu.roofline import measure, step_seconds
from bench.gpu.section import Section
from bench.gpu.workload import forced, forcing, groups, model, recorded, shapes

# of falling value: what the project promises first
SAMPLES = (16, 64, 4, 1, 32, 8, 128, 256)
# a pair is of another prompt each time, while there are new ones; at 16 samples there are twenty,
# if the box has time for them: it gets twice the time of others
PAIRS, MOST_PAIRS = 5, {16: 20}
# tokens of a sample that are profiled, and the share of the box for it
WATCHED, SPARE = 48, 0.08


def run(section: Section) -> None:
    section.facts["device rates"] = rates = measure(section.device)
    traces = recorded(section)
    if section.cuda:
        wanted, prompt_tokens = (16, 64, 1, 256) if section.quick else SAMPLES, 1024
    else:
        wanted, prompt_tokens = (4, 1), 128
    few = section.quick or not section.cuda
    pairs = {n: 1 if few else MOST_PAIRS.get(n, PAIRS) for n in wanted}
    section.facts["prompt tokens"] = prompt_tokens
    named = shapes(section)
    last = list(named)[-1]
    # of the time, kept for profiles
    spare = section.left * SPARE if section.cuda else 0.0
    for i, (name, config) in enumerate(named.items()):
        # each shape has an equal part of what is left
        end = section.left - (section.left - spare) / (len(named) - i)
        with csd.Engine(model(section, config), max_slots=max(wanted)) as engine:
            for j, n in enumerate(wanted):
                if section.left <= end:
                    section.skip(f"{name}, N={n}: no time")
                    continue
                parts = [2 if m in MOST_PAIRS else 1 for m in wanted[j:]]
                until = section.left - (section.left - end) * parts[0] / sum(parts)
                measure_one(section, engine, name, traces, n, pairs[n], prompt_tokens, rates, until)
            if name == last:
                profile(section, engine, name, traces, prompt_tokens)
        del engine
        if section.cuda:
            torch.cuda.empty_cache()
    for name, config in list(named.items())[:-1]:
        if section.left > 0:
            with csd.Engine(model(section, config), max_slots=max(wanted)) as engine:
                profile(section, engine, name, traces, prompt_tokens)


def profile(section: Section, engine, name: str, traces, prompt_tokens: int) -> None:
    """Add milliseconds of a step by phase to a shape's rows, as long as there is time.

    Nothing is timed behind a profiler, which may stay in the way of launches.
    """
    for row in section.rows:
        if row["shape"] == name and section.left > 0:
            picked = shortened(groups(traces, row["N"]))
            with forcing(engine, picked):
                row["phases ms"] = phases(section, engine, picked, prompt_tokens)
            section.write("running")


def shortened(picked: list, tokens: int = WATCHED) -> list:
    """Enough steps to see where the time goes, few enough for a profile."""
    return [replace(t, samples=[s[:tokens] for s in t.samples]) for t in picked]


def measure_one(section, engine, name, traces, n, pairs, prompt_tokens, rates, until):
    """One row: N samples, `pairs` pairs of runs on as many prompts where there are."""
    seconds = {True: [], False: []}
    runs = []
    if section.cuda:
        torch.cuda.reset_peak_memory_stats()
    sets = [groups(traces, n, turn) for turn in range(pairs)]
    every = list({t.problem: t for picked in sets for t in picked}.values())
    if sum(len(t.samples) for t in sets[0]) < n:
        section.skip(f"{name}, N={n}: the traces hold fewer samples")
        return
    with forcing(engine, every):
        # graphs are captured, costs measured and kernels compiled before anything is timed
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


def timed(section: Section, engine, run) -> tuple[float, list]:
    """Seconds and results of a run; of another one, if this one met a pool size that was new."""

    def once() -> tuple[float, list]:
        results: list = []
        return section.clock(lambda: results.extend(run())), results

    return settled(engine, once)


def settled(engine, call):
    """What a call returns; the second time, if the first captured graphs.

    It met a pool size that was new, or needed larger caches, and so all graphs anew.
    """
    before, count = engine.captured, len(engine.captured)
    found = call()
    now = engine.captured
    return call() if now and (now is not before or len(now) > count) else found


def figures(seconds: dict, runs: list) -> dict:
    """Rates and ratios over the pairs, tau and pool size of the runs with drafts."""
    ratio = [p / s for s, p in zip(seconds[True], seconds[False], strict=True)]
    low, high = bootstrap(ratio)
    tokens = [sum(out.stats.tokens for out in results) for results in runs]
    # runs alternate, plain first in the first pair
    order = [
        s for turn in range(len(ratio)) for s in ((True, False) if turn % 2 else (False, True))
    ]
    rate = {s: [] for s in (True, False)}
    done = {True: 0, False: 0}
    for speculate, count in zip(order, tokens, strict=True):
        rate[speculate].append(count / seconds[speculate][done[speculate]])
        done[speculate] += 1
    drafted = [r for s, r in zip(order, runs, strict=True) if s]
    stats = [out.stats for results in drafted for out in results]
    steps = sum(max(out.stats.steps for out in results) for results in drafted)
    sample_steps = sum(s.sample_steps for s in stats)
    plain = [r for s, r in zip(order, runs, strict=True) if not s]
    return {
        "tokens": statistics.mean(tokens),
        "tau": sum(s.tokens for s in stats) / sample_steps,
        "tokens/s": statistics.median(rate[True]),
        "plain tokens/s": statistics.median(rate[False]),
        "speedup": statistics.median(ratio),
        "low": low,
        "high": high,
        "steps": steps / len(drafted),
        "plain steps": statistics.mean(max(o.stats.steps for o in r) for r in plain),
        "live": sample_steps / steps,
        "rows": (sum(s.nodes_proposed for s in stats) + sample_steps) / steps,
        "seconds": statistics.median(seconds[True]),
        "plain seconds": statistics.median(seconds[False]),
    }


def prefill(section: Section, engine, picked, prompt_tokens: int) -> float:
    """Seconds until every sample has its first token."""
    once = forced(engine, shortened(picked, 1), prompt_tokens, speculate=False)
    once()
    return section.clock(once)


def against_roofline(engine, row, picked, prompt_tokens, prefilled, rates) -> dict:
    """Step times without prefill, beside the least they could be at the run's averages."""
    prompts = [max(prompt_tokens, len(t.prompt)) for t in picked]
    lengths = [len(s) for t in picked for s in t.samples]
    # a sample's committed tokens, averaged over its steps
    context = sum(x * x for x in lengths) / sum(lengths) / 2
    common = dict(prompts=prompts, context=context, itemsize=engine.dtype.itemsize, **rates)
    live = row["live"]
    plain_live = row["tokens"] / row["plain steps"]
    least = step_seconds(engine.config, rows=row["rows"], live=live, **common)
    plain = step_seconds(engine.config, rows=plain_live, live=plain_live, **common)
    step = max(row["seconds"] - prefilled, 0) / max(row["steps"] - 1, 1)
    plain_step = max(row["plain seconds"] - prefilled, 0) / max(row["plain steps"] - 1, 1)
    return {
        "prefill ms": prefilled * 1e3,
        "step ms": step * 1e3,
        "plain step ms": plain_step * 1e3,
        "roofline ms": least * 1e3,
        "plain roofline ms": plain * 1e3,
        "roofline share": least / step if step else None,
        "plain roofline share": plain / plain_step if plain_step else None,
        # if both kinds of steps took what they must
        "ideal speedup": (row["plain steps"] * plain) / (row["steps"] * least),
    }


def phases(section: Section, engine, picked: list, prompt_tokens: int) -> dict:
    """Milliseconds of a step by phase: the device's, or the host's clock where there is none.

    The prompts' pass is no part of it. On a device the time of a run that draws one token a sample
    is taken off, as it is off `step ms`: that pass and the first step.
    """
    run = forced(engine, picked, prompt_tokens, speculate=True)
    if not section.cuda:
        out = run()[0]
        spent = {k: v for k, v in out.stats.seconds.items() if k != "prefill"}
        return {k: 1e3 * v / out.stats.steps for k, v in spent.items()}
    first = forced(engine, shortened(picked, 1), prompt_tokens, speculate=False)
    # the longer one first: its caches are large enough for both
    spent, results = profiled(engine, run)
    begun, _ = profiled(engine, first)
    steps = max(max(out.stats.steps for out in results) - 1, 1)
    # a phase of nearly nothing may come out less than that
    return {k: 1e3 * max(v - begun.get(k, 0.0), 0.0) / steps for k, v in spent.items()}


def profiled(engine, run) -> tuple[dict, list]:
    """The device's seconds by phase, and the results, of a run behind one that nothing watches."""
    run()

    def once() -> tuple[dict, list]:
        results: list = []
        return device_seconds(lambda: results.extend(run())), results

    return settled(engine, once)


def waits(run) -> dict:
    """Synchronising calls that torch reports in one more run; waits on events are none of them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = sum("synchroniz" in str(w.message) for w in caught)
    steps = max(out.stats.steps for out in results)
    return {"synchronisations": found, "synchronisations a step": found / steps}
