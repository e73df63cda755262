"""cp.async: copies from global to shared memory that are there when they were waited for."""

import numpy as np

from .lanes import reader
from .memory import address
from .text import Instruction


class Copies:
    """Of a crew: those told, in groups. What nobody waited for has not come."""

    def __init__(self):
        self.told: list = []
        self.groups: list[list] = []

    def commit(self) -> None:
        self.groups.append(self.told)
        self.told = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for copy in self.groups.pop(0):
                copy()


def compiled(i: Instruction):
    if i.op[2] == "commit_group":
        return lambda crew, mask: crew.copies.commit()
    if i.op[2] == "wait_group":
        return lambda crew, mask: crew.copies.wait(i.args[0])
    if i.op[2] not in ("cg", "ca"):
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    target, source = address(i.args[0]), address(i.args[1])
    size = i.args[2]
    given = reader(i.args[3], "u32") if len(i.args) > 3 else None

    def copy(crew, mask):
        to, of = target(crew).copy(), source(crew).copy()
        active = np.ones(crew.threads, bool) if mask is True else mask.copy()
        wanted = np.full(crew.threads, size) if given is None else given(crew).copy()
        # all or nothing: the rest would be zero
        if not np.isin(wanted[active], (0, size)).all():
            raise NotImplementedError(f"a part of {size} bytes: {i}")
        crew.copies.told.append(lambda: arrive(crew, to, of, active, wanted > 0))

    def arrive(crew, to, of, active, wanted):
        words = crew.memory("global").load(crew, of, 4, size // 4, active & wanted, i)
        words = [np.where(wanted, word, 0).astype(np.uint32) for word in words]
        crew.memory("shared").store(crew, to, words, 4, active, i)

    return copy
