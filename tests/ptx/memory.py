"""Global and shared memory: who may touch what, and who must not have touched it meanwhile."""

import mmap

import numpy as np

from .lanes import reader, writer
from .text import Address, Instruction, Register

_BEGIN = 4096


class _Host:
    """All of the host's memory from `_BEGIN` on."""

    @property
    def __array_interface__(self):
        size = (1 << 47) - 2 * _BEGIN
        return {"shape": (size,), "typestr": "|u1", "data": (_BEGIN, False), "version": 3}


_HOSTS = {size: np.asarray(_Host()).view(f"u{size}") for size in (1, 2, 4, 8)}
# stands in for a block or a warp where more than one has been there
_MANY = -1
_ATOMIC = -2


class MemoryFault(RuntimeError):
    """What a GPU would stop at, or what comes out differently from run to run."""


class Region:
    """Bytes from `begin` to `end`, and who touched each of them last, since when.

    `written` and `read` hold of each byte [block, interval between barriers, warp], 0 for nobody;
    blocks are counted from 1.
    """

    def __init__(self, begin: int, end: int):
        self.begin, self.end = begin, end
        self.written, self.read = _sparse(end - begin), _sparse(end - begin)


def _sparse(size: int) -> np.ndarray:
    """Zeros [3, size] that take memory where they are written only."""
    # MAP_NORESERVE, which older Pythons do not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return np.frombuffer(mmap.mmap(-1, 12 * max(size, 1), flags), np.int32).reshape(3, -1)


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
            self._note_read(crew, at, size * count, which, active, i)
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
        given = [np.broadcast_to(v, crew.threads)[active] for v in values]
        first = (at - _BEGIN) // size
        same = np.ones(len(at), bool)
        for k, value in enumerate(given):
            same &= _HOSTS[size][first + k] == value
        self._note_write(crew, at, size * len(values), which, active, same, i)
        for k, value in enumerate(given):
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
        for r in np.unique(which):
            region, here = self.regions[r], which == r
            for byte in range(size):
                place = at[here] - region.begin + byte
                region.written[0, place] = _ATOMIC
        place = (at - _BEGIN) // size
        for thread, k in zip(active, place, strict=True):
            before[thread] = _HOSTS[size][k]
            _HOSTS[size][k] = function(before[thread], *(x[thread] for x in operands))
        return before

    def _note_read(self, crew, at, size, which, active, i) -> None:
        """A read of what another block wrote, or another warp since the last barrier, is a race."""
        block, since, warp = crew.block[active] + 1, crew.interval(active), crew.warp[active]
        for r in np.unique(which):
            region, here = self.regions[r], which == r
            b, s, w = block[here], since[here], warp[here]
            for byte in range(size):
                place = at[here] - region.begin + byte
                writer = region.written[:, place]
                bad = _others(writer, b, s, w)
                if bad.any():
                    raise MemoryFault(_race("reads what", region, place, bad, writer, b, w, i))
                by = region.read[:, place]
                new = (by[0] == 0) | ((by[0] == b) & (by[1] < s))
                first = np.where(new | (by[0] == b), b, _MANY)
                who = np.where(new | (by[2] == w), w, _MANY)
                region.read[:, place] = np.stack([first, np.where(new, s, by[1]), who])

    def _note_write(self, crew, at, size, which, active, same, i) -> None:
        block, since, warp = crew.block[active] + 1, crew.interval(active), crew.warp[active]
        for r in np.unique(which):
            region, here = self.regions[r], which == r
            b, s, w = block[here], since[here], warp[here]
            for byte in range(size):
                place = at[here] - region.begin + byte
                for by in (region.written[:, place], region.read[:, place]):
                    # the value that is there already does no harm
                    bad = _others(by, b, s, w) & ~same[here]
                    if bad.any():
                        raise MemoryFault(_race("writes what", region, place, bad, by, b, w, i))
                region.written[:, place] = np.stack([b, s, w])


def _others(by, block, since, warp):
    """Whether someone was there whom no barrier separates from this."""
    elsewhere = (by[0] != 0) & (by[0] != block)
    return elsewhere | ((by[0] == block) & (by[1] == since) & (by[2] != warp))


def _race(verb, region, place, bad, by, block, warp, i) -> str:
    k = bad.argmax()
    at = f"byte {place[k]} of a tensor of {region.end - region.begin}"
    other, others = int(by[0, k]), int(by[2, k])
    of = "several warps" if others == _MANY else f"warp {others}"
    who = {_MANY: "several programs", _ATOMIC: "an atomic"}.get(other, f"program {other - 1}, {of}")
    return f"program {block[k] - 1}, warp {warp[k]} {verb} {who} touched: {at}: {i}"


class Shared:
    """Of a number of blocks, `size` bytes each; filled with what nobody wrote."""

    def __init__(self, blocks: int, size: int):
        self.size = -(-size // 16) * 16
        self._bytes = np.full(blocks * self.size, 0xA5, np.uint8)
        self._views = {n: self._bytes.view(f"u{n}") for n in (1, 2, 4, 8)}

    def _first(self, crew, addresses, size, count, active, i):
        at = addresses[active].astype(np.int64)
        if (at + size * count > self.size).any() or (at < 0).any():
            raise MemoryFault(f"shared memory has {self.size} bytes, address {at.max()}: {i}")
        if (at % (size * count)).any():
            raise MemoryFault(f"shared address not a multiple of {size * count} bytes: {i}")
        return (crew.place[active] * self.size + at) // size

    def load(self, crew, addresses, size, count, mask, i) -> list[np.ndarray]:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        first = self._first(crew, addresses, size, count, active, i)
        values = [np.zeros(crew.threads, f"u{size}") for _ in range(count)]
        for k, value in enumerate(values):
            value[active] = self._views[size][first + k]
        return values

    def store(self, crew, addresses, values, size, mask, i) -> None:
        active = np.arange(crew.threads) if mask is True else mask.nonzero()[0]
        first = self._first(crew, addresses, size, len(values), active, i)
        for k, value in enumerate(values):
            self._views[size][first + k] = np.broadcast_to(value, crew.threads)[active]

    def words(self, places, at, size: int, i) -> np.ndarray:
        """Words of `size` bytes at addresses [n, ...] of the programs `places` [n]."""
        return self._views[size][self._words(places, at, size, i)]

    def put_words(self, places, at, values, size: int, i) -> None:
        self._views[size][self._words(places, at, size, i)] = values

    def _words(self, places, at, size: int, i):
        if (at < 0).any() or (at + size > self.size).any() or (at % size).any():
            raise MemoryFault(f"shared memory has {self.size} bytes, address {at.max()}: {i}")
        return (places.reshape(-1, *[1] * (at.ndim - 1)) * self.size + at) // size


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
    "add": lambda old, x: old + x, "or": lambda old, x: old | x, "and": lambda old, x: old & x,
    "max": max, "min": min, "exch": lambda old, x: x,
    "cas": lambda old, was, x: x if old == was else old,
}  # fmt: skip


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
        put(crew, crew.memory("global").atomic(crew, at(crew), operands, function, size, mask, i),
            mask)  # fmt: skip

    return atomic
