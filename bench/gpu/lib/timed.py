"""Timing of runs that capture no graph."""

from dataclasses import replace

from bench.gpu.lib.section import Section

# tokens per sample of a profiled run
WATCHED = 48


def shortened(picked: list, tokens: int = WATCHED) -> list:
    """Traces cut to `tokens` tokens: enough steps to see the phases, few enough for a profile."""
    return [replace(t, samples=[s[:tokens] for s in t.samples]) for t in picked]


def timed(section: Section, engine, run) -> tuple[float, list]:
    """Seconds and results of a run; of a second run if the first captured graphs."""

    def once() -> tuple[float, list]:
        results: list = []
        return section.clock(lambda: results.extend(run())), results

    return settled(engine, once)


def settled(engine, call):
    """Result of a call; of its second run, if the first captured graphs.

    The first captures if a pool size is new, or if it needs larger caches and so all graphs again.
    """
    before, count = engine.captured, len(engine.captured)
    first = call()
    now = engine.captured
    return call() if now and (now is not before or len(now) > count) else first
