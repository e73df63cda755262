"""`csd record`: draws samples of prompts into a trace file; a stopped run can be resumed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

from csd.engine.call import trace_of
from csd.engine.engine import Engine
from csd.evaluate.resumable_results import ResumedFile
from csd.traces.traces import Trace, TraceLine, open_traces, write_traces
from csd.utils.check import Between, check, fits, shown


def part_of(out: str | Path) -> Path:
    """Path of a run's partial results, until its trace file is complete."""
    return Path(f"{out}.part")


def record(
    engine: Engine,
    prompts: list,
    out: str | Path,
    settings: dict,
    on_sample: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[Trace]:
    """Draw the missing samples of `prompts`, and write all samples to `out` in prompt order.

    settings: everything that samples depend on; a stopped run resumes only with equal settings.
    options: those of `csd.generate`; `seed` must be given.
    """
    part = ResumedFile(part_of(out), settings, _check_line, "part of a trace file")
    whole = None
    try:
        whole = open_traces(out)
        done = {row["problem"] for row in part.rows}
        if not done <= {*range(len(prompts))}:
            raise ValueError(f"{part_of(out)} has more prompts than the {len(prompts)} given")
        call = engine.prepare(prompts, record=os.fspath(out), **options)
        # the trace file is written below, not by the call
        call.record = None
        call.requests = [r for r in call.requests if r.index not in done]
        for request, _ in engine.draw(call) if call.requests else ():
            on_sample()
            if request.whole(until=None):
                part.add([trace_of(request).to_dict()])
        traces = [Trace.of(cast(TraceLine, row)) for row in part.rows]
        traces.sort(key=lambda trace: trace.problem)
        write_traces(whole, traces)
        part_of(out).unlink(missing_ok=True)
    finally:
        part.close()
        if whole is not None:
            whole.close()
    return traces


def _check_line(index: int, row: Any) -> None:
    check(row, TraceLine)
    number = row.get("problem")
    if not fits(number, Annotated[int, Between(0)]):
        raise ValueError(f"must have a prompt's number as 'problem', got {shown(number)}")
