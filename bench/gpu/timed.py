"""Runs that are timed: none of them captures a graph."""

from dataclasses import replace

from bench.gpu.section import Section

# tokens of a sample that are profiled
WATCHED = 48


def shortened(picked: list, tokens: int = WATCHED) -> list:
    """Enough steps to see where the time goes, few enough for a profile."""
    return [replace(t, samples=[s[:tokens] for s in t.samples]) for t in picked]


def timed(section: Section, engine, run) -> tuple[float, list]:
    """Seconds and results of a run; of another one, if this one met a pool size that was new."""

    def once() -> tuple[float, list]:
        results: list = []
        return section.clock(lambda: results.extend(run())), results

    return settled(engine, once)


def settled(engine, call):
    """Result of a call; of its second run, if the first captured graphs.

    It met a pool size that was new, or needed larger caches, and so all graphs anew.
    """
    before, count = engine.captured, len(engine.captured)
    found = call()
    now = engine.captured
    return call() if now and (now is not before or len(now) > count) else found
