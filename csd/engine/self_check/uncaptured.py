"""Steps of fixed shape without CUDA graphs."""

from collections.abc import Callable
from typing import Any

from csd.engine.cuda_graphs import Captures
from csd.engine.engine import Engine
from csd.engine.static_step import StaticStep
from csd.engine.step import Step


class _Launches:
    """Replaces a CUDA graph: each replay runs the step and copies it into the first snapshot."""

    def __init__(self, run: Callable[[], Any], result: Any):
        self._run, self._snapshot = run, result[0]

    def replay(self) -> None:
        snapshot = self._run()[0]
        self._snapshot.ints.copy_(snapshot.ints)
        self._snapshot.floats.copy_(snapshot.floats)


class _Uncaptured(Captures):
    def get(self, key: Any, run: Callable[[], Any]) -> Any:
        if key not in self.graphs:
            result = run()
            self.graphs[key] = (_Launches(run, result), result)
        return self.graphs[key]


class UncapturedEngine(Engine):
    """Engine without captures, whose products have as many rows as those of captured steps."""

    def _allocate(self, *args: Any, **options: Any) -> Step:
        step = super()._allocate(*args, **options)
        if isinstance(step, StaticStep):
            step.captures = _Uncaptured()
        return step
