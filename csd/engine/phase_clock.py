"""Seconds of a step by phase."""

import time

from csd.state.preparation_phases import preparation


class Clock:
    """Adds the time since the last lap to a phase's seconds; compiling and measuring meanwhile
    count as their own kinds."""

    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds
        self._last, self._prepared = time.perf_counter(), preparation()

    def lap(self, phase: str) -> None:
        now, prepared = time.perf_counter(), preparation()
        self._seconds[phase] += now - self._last
        for kind, seconds in prepared.items():
            self._seconds[kind] += seconds - self._prepared[kind]
            self._seconds[phase] -= seconds - self._prepared[kind]
        self._last, self._prepared = now, prepared
