"""Programs of a launch, run: each thread at its own place, warps in any order between barriers."""

from itertools import product

import numpy as np

from . import copies, lanes, memory, warps, wgmma
from .memory import Global, Shared
from .registers import BITS, TYPES
from .text import Code, Instruction

MEMORY = {"ld", "st", "atom"}
# orders memory as seen by other units: here there is one order
# launches follow each other here, and memory has no caches
NOTHING = {"fence", "membar", "griddepcontrol", "prefetch"}
# most threads that run at once, which bounds the memory of their registers
THREADS = 4096


class Kernel:
    """A kernel's code with its instructions as functions."""

    def __init__(self, code: Code):
        self.code = code
        self.blocks = [[_compiled(i) for i in block] for block in code.blocks]
        self.in_fours = any(i.op[0] == "wgmma" for block in code.blocks for i in block)

    def launch(self, grid, values: list, places, shared: int, seed: int | None = 0) -> None:
        """grid: three sizes. values: of the parameters. places: (begin, end) of what it may touch.

        seed: of the order of programs, and of warps between two barriers; None: programs in their
        order, warps in step.
        """
        everywhere = [p[::-1] for p in product(*map(range, reversed(grid)))]
        order = np.random.default_rng(seed)
        if seed is not None:
            order.shuffle(everywhere)
        space = Global(places)
        values = dict(zip(self.code.params, values, strict=True))
        step = max(1, THREADS // self.code.threads)
        for begin in range(0, len(everywhere), step):
            self._run(everywhere[begin : begin + step], grid, values, space, shared, order, seed)

    def _run(self, places, grid, values, space, shared, order, seed) -> None:
        count = self.code.threads // 32
        per = count if seed is None else 4 if self.in_fours else 1
        programs = Programs(np.array(places), grid, values, space, Shared(len(places), shared))
        crews = [
            Crew(self, programs, np.arange(first, first + per)) for first in range(0, count, per)
        ]
        while any(crew.runnable() for crew in crews):
            for k in order.permutation(len(crews)):
                crews[k].run()
            self._release(programs, crews)

    @staticmethod
    def _release(programs, crews) -> None:
        """Programs all of whose threads wait at one barrier go on."""
        waiting = np.stack([c.by_program(c.waiting) for c in crews])
        done = np.stack([c.by_program(c.done) for c in crews])
        if (waiting.any((0, 2)) & done.any((0, 2))).any():
            raise RuntimeError("threads wait at a barrier for others that have ended")
        ready = waiting.all((0, 2))
        for crew in crews:
            crew.waiting &= ~ready[crew.program]
        programs.interval += ready


class Programs:
    """Shared state of the warps of some programs. places [P, 3]: theirs in the grid."""

    def __init__(self, places, grid, values, space, shared):
        self.places, self.grid, self.values = places, grid, values
        self.numbers = places[:, 0] + grid[0] * (places[:, 1] + grid[1] * places[:, 2])
        self.interval = np.ones(len(places), np.int64)
        self.spaces = {"global": space, "shared": shared}


class Crew:
    """The warps of the same numbers of several programs, which run in step.

    registers: by the character of a NumPy type, one array [threads] for each register of its width.
    """

    def __init__(self, kernel: Kernel, programs: Programs, numbers):
        self._kernel, self._programs = kernel, programs
        count = len(programs.places)
        self.program = np.repeat(np.arange(count), len(numbers) * 32)
        self.threads = len(self.program)
        self._tid = np.tile((numbers[:, None] * 32 + np.arange(32)).reshape(-1), count)
        self.warp = self._tid // 32
        self.number = programs.numbers[self.program]
        self.registers: dict[str, list] = {}
        for width, number in kernel.code.registers.items():
            # memory that nothing wrote
            held = np.full((number, self.threads), 0xA5A5A5A5A5A5A5A5 % (1 << width), BITS[width])
            for dtype in {np.dtype(t) for t in TYPES.values()}:
                if dtype == BITS[width] or (width > 8 and dtype.itemsize * 8 == width):
                    self.registers[dtype.char] = list(held.view(dtype))
        self.at = np.zeros(self.threads, np.int64)
        self.waiting = np.zeros(self.threads, bool)
        self.done = np.zeros(self.threads, bool)
        self.copies = copies.Copies(self.threads // 32)

    def by_program(self, x):
        return x.reshape(len(self._programs.places), -1)

    def runnable(self) -> bool:
        return not (self.waiting | self.done).all()

    def run(self) -> None:
        """Until every thread waits at a barrier or has ended."""
        code = self._kernel.code
        while True:
            able = ~(self.waiting | self.done)
            if not able.any():
                return
            # the furthest behind first: paths that parted meet again
            here = int(np.where(able, self.at, len(code.blocks)).min())
            if here == len(code.blocks):
                raise RuntimeError(f"{code.name} ran past its end")
            mask = able & (self.at == here)
            every = True if mask.all() else mask
            with np.errstate(all="ignore"):
                for function in self._kernel.blocks[here]:
                    function(self, every)
            self._leave(code, code.blocks[here][-1], here, mask)

    def _leave(self, code: Code, last: Instruction, here: int, mask) -> None:
        self.at[mask] = here + 1
        taken = mask
        if last.guard is not None and last.op[0] in ("bra", "ret", "exit"):
            register, wanted = last.guard
            taken = mask & (self.registers["?"][register.index] == wanted)
        if last.op[0] == "bra":
            self.at[taken] = code.labels[last.args[-1]]
        elif last.op[0] in ("ret", "exit"):
            self.done |= taken
        elif last.op[:2] == ["bar", "sync"]:
            warps.together(self, True if mask.all() else mask, last)
            self.waiting |= mask

    # values that instructions read

    def special(self, name: str):
        if name == "%tid.x":
            return self._tid.astype(np.uint32)
        axis = "xyz".index(name[-1])
        if name.startswith("%ctaid."):
            return self._programs.places[self.program, axis].astype(np.uint32)
        if name.startswith("%nctaid."):
            return np.uint32(self._programs.grid[axis])
        raise NotImplementedError(name)

    def parameter(self, name: str, kind: str):
        value, dtype = self._programs.values[name], np.dtype(TYPES[kind])
        if isinstance(value, float):
            return np.array(value, f"f{dtype.itemsize}").view(dtype)
        return np.array(value & (256**dtype.itemsize - 1), f"u{dtype.itemsize}").view(dtype)

    def memory(self, space: str):
        return self._programs.spaces[space]

    def interval(self, active):
        """Numbers of barriers that the programs of these threads have passed."""
        return self._programs.interval[self.program[active]]


def _compiled(i: Instruction):
    name = i.op[0]
    if i.op[:2] == ["bar", "sync"] and (i.args != [0] or i.guard is not None):
        raise NotImplementedError(f"a barrier of some: {i}")
    if name in ("bra", "ret", "exit") or i.op[:2] == ["bar", "sync"]:
        # at the end of its basic block
        return lambda crew, mask: None
    if name in NOTHING:
        return lambda crew, mask: None
    if name in MEMORY:
        function = memory.compiled(i)
    elif i.op[:2] == ["cp", "async"]:
        function = copies.compiled(i)
    elif name == "wgmma":
        function = wgmma.compiled(i)
    elif name in warps.OPERATIONS:
        function = warps.OPERATIONS[name](i)
    else:
        function = lanes.compiled(i)
    if i.guard is None:
        return function
    index, wanted = i.guard[0].index, i.guard[1]

    def guarded(crew, mask):
        chosen = crew.registers["?"][index] == wanted
        function(crew, chosen if mask is True else chosen & mask)

    return guarded
