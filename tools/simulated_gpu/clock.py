"""Seconds of a GPU's host that are not there: what compiling, capturing and checking would take."""

import math
from collections import Counter
from dataclasses import dataclass, field


class Killed(BaseException):
    """A process is ended because its time is over; nothing in it can go on."""


@dataclass
class Clock:
    """Within `Gpu(clock=..)`, `time.perf_counter` shows `now`.

    A kernel is compiled once for each dtype and last dimension of its tensors, by whichever section
    launches it first: the cache is the machine's.
    """

    compilation: float = 1.0  # of a kernel
    capture: float = 0.1  # of a graph
    check: float = 25.0  # of the kernels, once a shape, dtype and kind of engine
    launch: float = 1e-5
    now: float = 0.0
    deadline: float = math.inf
    charged: Counter = field(default_factory=Counter)
    compiled: set = field(default_factory=set)

    def charge(self, what: str, seconds: float) -> None:
        """Raises Killed behind the deadline."""
        self.now += seconds
        self.charged[what] += seconds
        if self.now > self.deadline:
            raise Killed

    def compile(self, kernel: str, leaves: list) -> None:
        key = kernel, *((x.dtype, x.shape[-1:]) for x in leaves)
        if key not in self.compiled:
            self.charge("compilation", self.compilation)
            self.compiled.add(key)
