"""Accesses to every byte of memory, and the barriers between them.

Two programs of a launch, or two warps of a program between two barriers, may come in either order.
If one of them writes what the other touches, what comes out depends on it.
"""

import mmap

import numpy as np

# who touched a byte is one number: program << 32 | interval between barriers << 8 | warp, the first
# two counted from 1; 0 is nobody
INTERVAL, PROGRAM = 8, 32
# in the place of a warp or a program: more than one, and whatever program's atomic operation
WARPS = (1 << INTERVAL) - 1
PROGRAMS, ATOMIC = ((1 << 31) - 1) << PROGRAM, ((1 << 31) - 2) << PROGRAM


class MemoryFault(RuntimeError):
    """A fault at which a GPU stops, or a race whose result differs from run to run."""


class Region:
    """Bytes from `begin` to `end`, and who touched each of them last."""

    def __init__(self, begin: int, end: int):
        self.begin, self.end = begin, end
        self.written, self.read = _sparse(end - begin), _sparse(end - begin)

    def note_read(self, place, who, i) -> None:
        """place, who [n]: bytes from the beginning, and who is there."""
        self._check("reads what", place, who, self.written[place], True, i)
        by = self.read[place]
        # this program and interval: one warp, or several; others: several programs
        together = np.where(by >> INTERVAL == who >> INTERVAL, who | WARPS, PROGRAMS)
        later = (by >> PROGRAM == who >> PROGRAM) & (by < who & ~WARPS)
        _put(self.read, place, np.where((by == 0) | (by == who) | later, who, together))

    def note_write(self, place, who, same, i) -> None:
        """same: where the value was there already, which does no harm."""
        by = self.written[place]
        for access in (by, self.read[place]):
            self._check("writes what", place, who, access, ~same, i)
        # all who wrote the same are kept
        together = np.where(by >> INTERVAL == who >> INTERVAL, who | WARPS, PROGRAMS)
        _put(self.written, place, np.where(_apart(by, who), together, who))

    def note_atomic(self, place, who, i) -> None:
        """Atomic operations harm each other in no order; what is read or stored plainly they do."""
        for by in (self.written[place], self.read[place]):
            self._check("changes at once what", place, who, by, by != ATOMIC, i)
        self.written[place] = ATOMIC

    def _check(self, verb, place, who, by, counts, i) -> None:
        if ((by == 0) | (by == who)).all():
            return
        bad = _apart(by, who) & counts
        if not bad.any():
            return
        k = bad.argmax()
        program, warp = int(by[k] >> PROGRAM) - 1, int(by[k] & WARPS)
        other = f"program {program}, " + ("several warps" if warp == WARPS else f"warp {warp}")
        other = {PROGRAMS: "several programs", ATOMIC: "an atomic operation"}.get(int(by[k]), other)
        raise MemoryFault(
            f"program {(who[k] >> PROGRAM) - 1}, warp {who[k] & WARPS} {verb} {other} touched, and "
            f"nothing keeps them apart: byte {place[k]} of {self.end - self.begin}: {i}"
        )


def _sparse(size: int) -> np.ndarray:
    """Zeros [size] that take memory where they are written only."""
    # MAP_NORESERVE, which older Pythons do not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return np.frombuffer(mmap.mmap(-1, 8 * max(size, 1), flags), np.int64)


def _apart(by, who):
    """True if an access was made that no barrier separates from this one."""
    elsewhere = by >> PROGRAM != who >> PROGRAM
    return (by != 0) & (elsewhere | ((by >> INTERVAL == who >> INTERVAL) & (by != who)))


def _put(record, place, access) -> None:
    """Record the threads of one instruction, all of them where they share a place."""
    record[place] = access
    stored = record[place]
    lost = stored != access
    if lost.any():
        record[place[lost]] = access[lost] | WARPS
        other = lost & (stored >> PROGRAM != access >> PROGRAM)
        record[place[other]] = PROGRAMS
