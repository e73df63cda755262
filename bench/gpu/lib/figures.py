"""Figures of a row of `end_to_end`: rates, ratios, and step times compared to the roofline."""

import statistics

from bench.gpu.lib.roofline import step_seconds
from bench.lib.common import bootstrap


def figures(seconds: dict, runs: list) -> dict:
    """Rates and ratios over the pairs, tau and pool size of the runs with drafts."""
    ratio = [p / s for s, p in zip(seconds[True], seconds[False], strict=True)]
    low, high = bootstrap(ratio)
    tokens = [sum(out.stats.tokens for out in results) for results in runs]
    # runs alternate; the first pair begins with the plain one
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


def against_roofline(engine, row, picked, prompt_tokens, prefilled, rates) -> dict:
    """Step times without prefill, and their lower bound at the run's average sizes."""
    prompts = [max(prompt_tokens, len(t.prompt)) for t in picked]
    lengths = [len(s) for t in picked for s in t.samples]
    # average over a sample's steps of its committed tokens
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
        # speed-up if both kinds of steps took their lower bound
        "ideal speedup": (row["plain steps"] * plain) / (row["steps"] * least),
    }
