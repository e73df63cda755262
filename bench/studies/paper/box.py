"""A section of the study: its rows, time limit and traces."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.studies.paper.record_study import TRACES
from csd.traces.traces import Trace, read_traces

# tokens of a recorded sample with --quick
QUICK_TOKENS = 12


@dataclass
class Box:
    """A section's rows, the cases left out for lack of time, and its arguments."""

    seconds: float
    quick: bool = False
    files: list[Path] = field(default_factory=list)  # further traces
    prompts: Path | None = None  # JSONL for live runs, with `question` or `problem`
    rows: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)
    save: Callable = lambda box: None  # called with the box after each row
    cut_short: bool = False  # True if cases were left out for lack of time
    _engines: dict = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the section begins no further case."""
        return self.seconds - (time.perf_counter() - self.start)

    def while_time(self, what: str, cases: Iterable) -> Iterator:
        """Yield cases until the time is over; records the number of those left out."""
        cases = list(cases)[: 2 if self.quick else None]
        for i, case in enumerate(cases):
            if self.left < 0:
                self.cut_short = True
                self.notes.append(f"{len(cases) - i} of {len(cases)} {what} left out: no time left")
                return
            yield case

    def add(self, **row) -> None:
        self.rows.append(row)
        self.save(self)
        print("  " + ", ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)

    def recorded(self, start: str, end: str = "") -> list[Trace]:
        """Returns the study's own traces whose problem starts with `start` and ends with `end`."""
        traces = [
            t
            for t in read_traces(TRACES)
            if str(t.problem).startswith(start) and str(t.problem).endswith(end)
        ]
        return self.cut(traces)

    def further(self, problems: int) -> Iterator[tuple[str, list[Trace]]]:
        """Yield (name, first problems) of each further file."""
        for path in self.files:
            yield path.name.split(".jsonl")[0], self.cut(list(read_traces(path))[:problems])

    def cut(self, traces: list[Trace]) -> list[Trace]:
        """Returns `traces`, with --quick cut to two problems with a few tokens."""
        if not self.quick:
            return traces
        return [
            replace(t, samples=[s[:QUICK_TOKENS] for s in t.samples[:4]], top=t.top and t.top[:4])
            for t in traces[:2]
        ]

    def engine(self, slots: int):
        """Returns an engine of SmolLM2 with `slots` samples in flight; with --quick of a toy."""
        import csd
        from csd.models.demo import smollm2_path, toy

        if slots not in self._engines:
            if self.quick:
                model, tokenizer = toy()
                self._engines[slots] = csd.Engine(model, tokenizer=tokenizer, max_slots=slots)
            else:
                self._engines[slots] = csd.Engine(
                    smollm2_path(), max_slots=slots, dtype=torch.float32
                )
        return self._engines[slots]


def _short(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
