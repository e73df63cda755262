"""Totals of a server: for Prometheus, and for the page at /."""

import os
import time
from collections.abc import Iterator
from typing import Any

from csd.serve import AsyncEngine
from csd.serve.histogram import Histogram
from csd.serve.inbox import Counters


def snapshot(
    engine: AsyncEngine, responses: dict[int, int], answering: int, reading: int
) -> dict[str, Any]:
    """The current totals. responses: so far, by status; answering, reading: requests now."""
    counters = engine.counters
    return {
        "time": time.time(),
        **{name: getattr(counters, name) for name in _METRICS if hasattr(counters, name)},
        "tokens_per_step": counters.tokens_per_step,
        "requests": counters.requests + counters.withdrawn,
        "cancelled": counters.cancelled + counters.withdrawn,
        "accepted": dict(counters.accepted),
        "max_slots": engine.engine.max_slots,
        "waiting": engine.waiting,
        "answering": answering,
        "reading": reading,
        "responses": dict(responses),
        "weights_version": engine.weights,
        "resident_bytes": resident_bytes(),
    }


# name in the snapshot -> kind and description
_METRICS = {
    "tokens": ("counter", "Sampled tokens."),
    "steps": ("counter", "Steps of the engine."),
    "sample_steps": ("counter", "Steps of the engine, summed over the samples in each step."),
    "prompt_tokens": ("counter", "Prompt tokens read by the model."),
    "cached_prompt_tokens": (
        "counter",
        "Prompt tokens not read, because an earlier prompt begins with the same ones.",
    ),
    "shared_prompt_tokens": (
        "counter",
        "Prompt tokens not read, because an equal prompt was in flight.",
    ),
    "shared_samples": (
        "counter",
        "Samples drawn by another request of the same API key, or of anyone with --share.",
    ),
    "requests": ("counter", "Requests that have ended."),
    "cancelled": ("counter", "Requests cancelled before all their samples had ended."),
    "failed": ("counter", "Requests that ended with an error."),
    "samples": ("counter", "Samples drawn to their end."),
    "nodes_proposed": ("counter", "Drafted tokens that were verified."),
    "slots": ("gauge", "Samples in flight."),
    "max_slots": ("gauge", "Maximum number of samples in flight."),
    "groups": ("gauge", "Groups in flight."),
    "waiting": ("gauge", "Requests waiting for a slot."),
    "pages": ("gauge", "Pages of the cache of keys and values."),
    "free_pages": ("gauge", "Free pages of that cache."),
    "cached_pages": ("gauge", "Of the free pages, those that have beginnings of earlier prompts."),
    "answering": ("gauge", "HTTP requests being answered."),
    "reading": ("gauge", "Bodies whose text is being read, or waits for it."),
    "weights_version": ("gauge", "Updates of the weights since the start."),
    "resident_bytes": ("gauge", "Resident memory of the process."),
}


# name -> description
_HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "Time from a request to its first token."),
    "per_token": ("time_per_output_token_seconds", "Time per token behind the first one."),
}


def prometheus(totals: dict[str, Any], counters: Counters) -> str:
    """The snapshot, and the histograms of `counters`, in Prometheus's text format."""
    return "\n".join([*_lines(totals), *_histograms(counters)]) + "\n"


def _histograms(counters: Counters) -> Iterator[str]:
    for field, (name, text) in _HISTOGRAMS.items():
        histogram: Histogram = getattr(counters, field)
        full = f"csd_{name}"
        yield from _head(full, "histogram", text)
        buckets = [*histogram.cumulative()]
        for bound, count in buckets:
            yield f'{full}_bucket{{le="{bound}"}} {count}'
        yield f"{full}_sum {histogram.sum}"
        # the same number as of the last bucket, whatever is added meanwhile
        yield f"{full}_count {buckets[-1][1]}"


def _lines(totals: dict[str, Any]) -> Iterator[str]:
    for name, (kind, text) in _METRICS.items():
        full = f"csd_{name}_total" if kind == "counter" else f"csd_{name}"
        yield from _head(full, kind, text)
        yield f"{full} {totals[name]}"
    yield from _head("csd_accepted_total", "counter", "Drafted tokens accepted, by source.")
    for source, count in totals["accepted"].items():
        yield f'csd_accepted_total{{source="{source}"}} {count}'
    yield from _head("csd_responses_total", "counter", "HTTP responses, by status.")
    for status, count in sorted(totals["responses"].items()):
        yield f'csd_responses_total{{status="{status}"}} {count}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
