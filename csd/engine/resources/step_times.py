"""Seconds of an engine's steps by their rows, from which automatic budgets are chosen."""

from csd.engine.call import RunSettings
from csd.engine.first_call.time_steps import (
    NOT_WORTH,
    compile_loops,
    load_step_times,
    refined,
    save_step_times,
    sizes_to_time,
    step_times_key,
    time_graphs,
    time_steps,
)
from csd.engine.resources.caches import Caches
from csd.engine.resources.model import EngineModel
from csd.engine.step.budget import AutoBudget, AutoPool, Budget, FixedPool, StepTimeTable
from csd.engine.step.static_step import StaticStep, sizes_for
from csd.engine.step.step import Step
from csd.utils.torch_state import plain_torch


class StepTimes:
    """Step times of an engine's current model, measured at the first call that needs them.

    `table` is None before.
    """

    def __init__(self, model: EngineModel, caches: Caches):
        self._model, self._caches = model, caches
        self._timed = self._kind
        self._table: StepTimeTable | None = None

    @property
    def _kind(self) -> tuple:
        """The properties that the times of steps depend on."""
        return self._model.decoder.config, self._model.device, self._model.dtype

    @property
    def table(self) -> StepTimeTable | None:
        if self._timed != self._kind:
            # steps of other sizes take other times
            self._timed, self._table = self._kind, None
        return self._table

    @table.setter
    def table(self, table: StepTimeTable | None) -> None:
        self._timed, self._table = self._kind, table

    def budget(self, settings: RunSettings, step: Step) -> Budget:
        """Returns the budget of a call with these settings."""
        sizes = None
        if isinstance(step, StaticStep) and not step.verifier:
            sizes = sizes_for(step.slots.count)
        nodes = settings.budget if settings.speculate else 0
        if isinstance(nodes, int):
            return FixedPool(nodes, sizes) if sizes else Budget(nodes)
        table = self.plain(step)
        return AutoPool(table, sizes) if sizes else AutoBudget(table)

    @plain_torch()
    def measure(self, worth: float = NOT_WORTH, repeats: int = 3) -> StepTimeTable:
        """Seconds of forward and verify for a few pool sizes, measured on empty slots.

        worth: on a CPU, sizes after the first that takes `worth` times the smallest are left out.
        repeats: most timings of each size.
        """
        static = self._model.static and self._model.device.type == "cuda"
        sizes = sizes_to_time(self._caches.max_slots, static)
        return time_steps(self._caches.small_step(sizes[-1]), sizes, worth, repeats)

    @plain_torch()
    def plain(self, step: Step | None = None) -> StepTimeTable:
        """Seconds of steps without drafts by their rows, from the cache or measured and cached.

        step: the call's step; if it has CUDA graphs, these are measured instead and not cached.
        """
        if self.table is None:
            if isinstance(step, StaticStep) and self._model.device.type == "cuda":
                self.table = time_graphs(step, sizes_for(step.slots.count))
            else:
                self.table = self._read()
        return self.table

    def _read(self) -> StepTimeTable:
        model, sizes = self._model, sizes_to_time(self._caches.max_slots, False)
        key = step_times_key(model.decoder, model.dtype, model.ops.name, sizes)
        table = load_step_times(key) if key else None
        if table is None or not table.settled:
            table = refined(table, self.measure(repeats=1)) if table else self.measure()
            if key:
                save_step_times(key, table)
            return table
        compile_loops(self._caches.small_step(sizes[-1]), sizes)
        return table
