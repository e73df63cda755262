"""Global and shared memory, and the instructions that load, store and change it."""

import numpy as np

from .races import INTERVAL, PROGRAM, WARPS, MemoryFault, Region
from .registers import reader, writer
from .text import Address, Instruction, Register

_BEGIN = 4096


class _Host:
    """All of the host's memory from `_BEGIN` on."""

    @property
    def __array_interface__(self):
        size = (1 << 47) - 2 * _BEGIN
        return {"shape": (size,), "typestr": "|u1", "data": (_BEGIN, False), "version": 3}


_HOSTS = {size: np.asarray(_Host()).view(f"u{size}") for size in (1, 2, 4, 8)}


class Global:
    """The memory of a launch's tensors."""

    def __init__(self, places: list[tuple[int, int]]):
        self.regions = [Region(*place) for place in sorted(set(places))]
        self._begins = np.array([r.begin for r in self.regions] or [0], np.int64)
        self._ends = np.array([r.end for r in self.regions] or [0], np.int64)

    def _region(self, addresses, size: int, i: Instruction):
        which = np.searchsorted(self._begins, addresses, side="right") - 1
        outside = (which < 0) | (addresses + size > self._ends[which])
        if outside.any():
            bad = int(addresses[outside.argmax()])
            near = [f"[{r.begin:#x}, {r.end:#x})" for r in self.regions]
            raise MemoryFault(f"address {bad:#x} is in no tensor of {', '.join(near)}: {i}")
        if (addresses % size).any():
            bad = int(addresses[(addresses % size).argmax()])
            raise MemoryFault(f"address {bad:#x} is not a multiple of {size} bytes: {i}")
        return which

    def load(self, crew, addresses, size, count, mask, i) -> list[np.ndarray]:
        """`count` values of `size` bytes a thread, from consecutive addresses."""
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        values = [np.zeros(crew.threads, f"u{size}") for _ in range(count)]
        if len(active):
            at = addresses[active].astype(np.int64)
            which = self._region(at, size * count, i)
            for region, place, who, _ in self._note(crew, at, size * count, which, active):
                region.note_read(place, who, i)
            first = (at - _BEGIN) // size
            for k in range(count):
                values[k][active] = _HOSTS[size][first + k]
        return values

    def store(self, crew, addresses, values, size, mask, i) -> None:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        if not len(active):
            return
        at = addresses[active].astype(np.int64)
        which = self._region(at, size * len(values), i)
        active_values = [np.broadcast_to(v, crew.threads)[active] for v in values]
        first = (at - _BEGIN) // size
        same = np.ones(len(at), bool)
        for k, value in enumerate(active_values):
            same &= _HOSTS[size][first + k] == value
        for region, place, who, here in self._note(crew, at, size * len(values), which, active):
            region.note_write(place, who, np.repeat(same[here], size * len(values)), i)
        for k, value in enumerate(active_values):
            _HOSTS[size][first + k] = value
            if (_HOSTS[size][first + k] != value).any():
                raise MemoryFault(f"threads store different values at one address: {i}")

    def atomic(self, crew, addresses, operands, function, size, mask, i) -> np.ndarray:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        before = np.zeros(crew.threads, f"u{size}")
        if not len(active):
            return before
        at = addresses[active].astype(np.int64)
        which = self._region(at, size, i)
        for region, place, who, _ in self._note(crew, at, size, which, active):
            region.note_atomic(place, who, i)
        for thread, k in zip(active, (at - _BEGIN) // size, strict=True):
            before[thread] = _HOSTS[size][k]
            _HOSTS[size][k] = function(before[thread], *(x[thread] for x in operands))
        return before

    def _note(self, crew, at, size, which, active):
        """Region, bytes, who is there, and which of the threads' addresses these are."""
        who = _who(crew, active)
        for r in np.unique(which):
            region, here = self.regions[r], which == r
            place, by = _bytes(at[here] - region.begin, size, who[here])
            yield region, place, by, here


class Shared:
    """Shared memory of several programs, `size` bytes each, with a poison pattern at first."""

    def __init__(self, programs: int, size: int):
        self.size = -(-size // 16) * 16
        self._bytes = np.full(programs * self.size, 0xA5, np.uint8)
        self._region = Region(0, len(self._bytes))
        self._views = {n: self._bytes.view(f"u{n}") for n in (1, 2, 4, 8)}

    def load(self, crew, addresses, size, count, mask, i) -> list[np.ndarray]:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        at = self._places(crew.program[active], addresses[active], size * count, i)
        self._region.note_read(*_bytes(at, size * count, _who(crew, active)), i)
        values = [np.zeros(crew.threads, f"u{size}") for _ in range(count)]
        for k, value in enumerate(values):
            value[active] = self._views[size][at // size + k]
        return values

    def store(self, crew, addresses, values, size, mask, i) -> None:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        at = self._places(crew.program[active], addresses[active], size * len(values), i)
        active_values = [np.broadcast_to(value, crew.threads)[active] for value in values]
        self._put(at, active_values, size, _who(crew, active), i)

    def rows(self, crew, warps, addresses, i) -> np.ndarray:
        """[w, .., 4] words of rows of 16 bytes at addresses [w, ..], which the warps read."""
        at, who = self._rows(crew, warps, addresses, i)
        self._region.note_read(*_bytes(at.reshape(-1), 16, who), i)
        return self._views[4][at[..., None] // 4 + np.arange(4)]

    def put_rows(self, crew, warps, addresses, words, i) -> None:
        at, who = self._rows(crew, warps, addresses, i)
        self._put(at.reshape(-1), list(words.reshape(-1, 4).T), 4, who, i)

    def halves(self, crew, fours, addresses, i) -> np.ndarray:
        """16 bits each at addresses [g, ..], which groups of four warps read, each as a whole."""
        first = np.flatnonzero(np.repeat(fours, 128))[::128]
        program = crew.program[first].reshape(-1, *[1] * (addresses.ndim - 1))
        at = self._places(program, addresses, 2, i)
        who = np.repeat(_who(crew, first) | WARPS, addresses[0].size)
        self._region.note_read(*_bytes(at.reshape(-1), 2, who), i)
        return self._views[2][at // 2]

    def _rows(self, crew, warps, addresses, i):
        first = np.flatnonzero(np.repeat(warps, 32))[::32]
        program = crew.program[first].reshape(-1, *[1] * (addresses.ndim - 1))
        who = np.repeat(_who(crew, first), addresses[0].size)
        return self._places(program, addresses, 16, i), who

    def _places(self, programs, addresses, size: int, i) -> np.ndarray:
        at = addresses.astype(np.int64)
        if (at + size > self.size).any() or (at < 0).any():
            raise MemoryFault(f"shared memory has {self.size} bytes, address {at.max()}: {i}")
        if (at % size).any():
            raise MemoryFault(f"shared address not a multiple of {size} bytes: {i}")
        return programs * self.size + at

    def _put(self, at, values, size: int, who, i) -> None:
        same = np.ones(len(at), bool)
        for k, value in enumerate(values):
            same &= self._views[size][at // size + k] == value
        count = size * len(values)
        self._region.note_write(*_bytes(at, count, who), np.repeat(same, count), i)
        for k, value in enumerate(values):
            self._views[size][at // size + k] = value
            if (self._views[size][at // size + k] != value).any():
                raise MemoryFault(f"threads store different values at one address: {i}")


def _who(crew, threads) -> np.ndarray:
    """Identity of each thread, in the form of `Region`."""
    program, interval = crew.number[threads] + 1, crew.interval(threads)
    return program << PROGRAM | interval << INTERVAL | crew.warp[threads]


def _bytes(at, size: int, who) -> tuple[np.ndarray, np.ndarray]:
    """Every byte of words of `size` bytes, and who is there."""
    return (at[:, None] + np.arange(size)).reshape(-1), np.repeat(who, size)


def address(arg: Address, kind: str = "b64"):
    """f(crew): of each thread."""
    if isinstance(arg.base, Register):
        get = reader(arg.base, f"u{arg.base.width}")
        return lambda crew: np.broadcast_to(get(crew).astype(np.int64) + arg.offset, crew.threads)
    return lambda crew: np.full(crew.threads, arg.offset, np.int64)


def compiled(i: Instruction):
    if i.op[0] == "ld" and i.op[1] == "param":
        put, name, kind = writer(i.args[0], i.op[-1]), i.args[1].base, i.op[-1]
        return lambda crew, mask: put(crew, crew.parameter(name, kind), mask)
    space = next((x for x in i.op if x in ("global", "shared")), None)
    if space is None:
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    kind = i.op[-1]
    size = int(kind[1:].lstrip("f")) // 8
    if i.op[0] == "ld":
        targets = i.args[0] if isinstance(i.args[0], list) else [i.args[0]]
        puts, at = [writer(target, kind) for target in targets], address(i.args[1])

        def load(crew, mask):
            memory = crew.memory(space)
            values = memory.load(crew, at(crew), size, len(puts), mask, i)
            for put, value in zip(puts, values, strict=True):
                put(crew, value.view(f"{'i' if kind[0] == 's' else 'u'}{size}"), mask)

        return load
    if i.op[0] == "st":
        sources = i.args[1] if isinstance(i.args[1], list) else [i.args[1]]
        gets, at = [reader(source, f"b{8 * size}") for source in sources], address(i.args[0])

        def store(crew, mask):
            values = [get(crew) for get in gets]
            crew.memory(space).store(crew, at(crew), values, size, mask, i)

        return store
    return _atomic(i, kind, size)


ATOMICS = {
    "add": lambda old, x: old + x,
    "or": lambda old, x: old | x,
    "and": lambda old, x: old & x,
    "max": max,
    "min": min,
    "exch": lambda old, x: x,
    "cas": lambda old, was, x: x if old == was else old,
}


def _atomic(i: Instruction, kind: str, size: int):
    function = next((ATOMICS[x] for x in i.op if x in ATOMICS), None)
    if i.op[0] != "atom" or function is None or kind[0] not in "ubs":
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    if kind[0] == "s" and function in (max, min):
        raise NotImplementedError(f"no {'.'.join(i.op)} here: {i}")
    put, at = writer(i.args[0], f"u{8 * size}"), address(i.args[1])
    gets = [reader(arg, f"u{8 * size}") for arg in i.args[2:]]

    def atomic(crew, mask):
        operands = [np.broadcast_to(get(crew), crew.threads) for get in gets]
        put(
            crew,
            crew.memory("global").atomic(crew, at(crew), operands, function, size, mask, i),
            mask,
        )

    return atomic
