"""cp.async: copies from global to shared memory that are there when they were waited for."""

from collections import defaultdict

import numpy as np

from .memory import address
from .registers import reader
from .text import Instruction


class Copies:
    """Copies that the warps of a crew have issued, in groups, and nobody has waited for."""

    def __init__(self, warps: int):
        self._issued: list[list] = [[] for _ in range(warps)]
        self._groups: list[list] = [[] for _ in range(warps)]

    def issue(self, warps, copy) -> None:
        for w in warps:
            self._issued[w].append(copy)

    def commit(self, warps) -> None:
        for w in warps:
            self._groups[w].append(self._issued[w])
            self._issued[w] = []

    def wait(self, warps, left: int) -> None:
        """Until no more than `left` groups of each warp are on their way."""
        come = defaultdict(list)
        for w in warps:
            while len(self._groups[w]) > left:
                for copy in self._groups[w].pop(0):
                    come[copy].append(w)
        for copy, by in come.items():
            copy(by)


def _active(crew, mask) -> np.ndarray:
    """Numbers of the warps that are there."""
    lanes = np.ones(crew.threads, bool) if mask is True else mask
    return np.flatnonzero(lanes.reshape(-1, 32).any(1))


def compiled(i: Instruction):
    if i.op[2] == "commit_group":
        return lambda crew, mask: crew.copies.commit(_active(crew, mask))
    if i.op[2] == "wait_group":
        return lambda crew, mask: crew.copies.wait(_active(crew, mask), i.args[0])
    if i.op[2] not in ("cg", "ca"):
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    target, source = address(i.args[0]), address(i.args[1])
    size = i.args[2]
    source_size = reader(i.args[3], "u32") if len(i.args) > 3 else None

    def issue(crew, mask):
        to, of = target(crew).copy(), source(crew).copy()
        active = np.ones(crew.threads, bool) if mask is True else mask.copy()
        wanted = np.full(crew.threads, size if source_size is None else source_size(crew))
        # all or nothing: the rest would be zero
        if not np.isin(wanted[active], (0, size)).all():
            raise NotImplementedError(f"a part of {size} bytes: {i}")

        def arrive(warps):
            there = np.zeros((crew.threads // 32, 32), bool)
            there[warps] = True
            there = there.reshape(-1) & active
            memory = crew.memory("global")
            words = memory.load(crew, of, 4, size // 4, there & (wanted > 0), i)
            words = [np.where(wanted > 0, word, 0).astype(np.uint32) for word in words]
            crew.memory("shared").store(crew, to, words, 4, there, i)

        crew.copies.issue(_active(crew, mask), arrive)

    return issue
