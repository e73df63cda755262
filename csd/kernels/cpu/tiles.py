"""The sums of a few rows with a block of a weight's columns, held in the CPU's vector registers."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.cpu.lanes import FEATURES

WIDE = "+avx512f" in FEATURES
# numbers of a register, columns of a block, and the most rows whose sums leave registers for the
# block's numbers and for one of a row
LANES = 16 if WIDE else 8
COLUMNS = 2 * LANES
ROWS = 14 if WIDE else 6
LINE = 64

INT, BYTE, FLOAT = ir.IntType(32), ir.IntType(8), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)


@intrinsic
def tile(typing_context, rows, K, x, weight, start, y, stride, ahead, step, like):
    """y[r stride + c] = start[c] + sum over k of x[k rows + r] weight[k COLUMNS + c]

    For r < rows, one to ROWS of them, and c < COLUMNS; every sum is taken over k = 0, 1, .. with
    one rounding a product, whatever `rows` is. Addresses; x and start are float32, weight and y of
    the dtype of `like`: where that is bfloat16, weight has columns c and c + LANES side by side.
    Asks for the lines at ahead + k step of what is multiplied next.
    """
    low = like.dtype == types.uint16

    def generate(context, builder, signature, args):
        rows, K, *addresses, step, _ = args
        x, weight, start, y, stride, ahead = addresses
        done = builder.append_basic_block("done")
        found = builder.switch(rows, done)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows_{count}")
            found.add_case(rows.type(count), block)
            builder.position_at_end(block)
            made = _Tile(builder, count, low)
            made.begin(start)
            with cgutils.for_range(builder, K) as loop:
                made.add(x, weight, loop.index)
                made.fetch(ahead, step, loop.index)
            made.end(y, stride)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    index = types.intp
    return types.none(*[index] * 9, like), generate


class _Tile:
    """Code for a number of rows. low: bfloat16."""

    def __init__(self, builder: Any, rows: int, low: bool):
        self.builder, self.rows, self.low = builder, rows, low
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in "lr"] for _ in range(rows)]
        function = ir.FunctionType(FLOATS, [FLOATS] * 3)
        name = f"llvm.fma.v{LANES}f32"
        self.fma = cgutils.get_or_insert_function(builder.module, function, name)

    def begin(self, start: Any) -> None:
        pointer = self._at(start, FLOATS)
        for half in range(2):
            first = self.builder.load(self.builder.gep(pointer, [INT(half)]), align=4)
            for sums in self.sums:
                self.builder.store(first, sums[half])

    def add(self, x: Any, weight: Any, k: Any) -> None:
        builder = self.builder
        x_k = builder.gep(self._at(x, FLOAT), [builder.mul(k, k.type(self.rows))])
        columns = self._columns(weight, k)
        nothing = ir.Constant(FLOATS, ir.Undefined)
        for r, sums in enumerate(self.sums):
            number = builder.load(builder.gep(x_k, [INT(r)]))
            first = builder.insert_element(nothing, number, INT(0))
            spread = builder.shuffle_vector(first, nothing, _ints(0))
            for total, column in zip(sums, columns, strict=True):
                added = builder.call(self.fma, [spread, column, builder.load(total)])
                builder.store(added, total)

    def _columns(self, weight: Any, k: Any) -> tuple[Any, Any]:
        builder = self.builder
        if not self.low:
            at = builder.gep(self._at(weight, FLOATS), [builder.mul(k, k.type(2))])
            return builder.load(at, align=4), builder.load(builder.gep(at, [INT(1)]), align=4)
        pair = builder.load(builder.gep(self._at(weight, INTS), [k]), align=2)
        left = builder.shl(pair, _ints(16))
        right = builder.and_(pair, _ints(0xFFFF0000))
        return builder.bitcast(left, FLOATS), builder.bitcast(right, FLOATS)

    def fetch(self, ahead: Any, step: Any, k: Any) -> None:
        builder = self.builder
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", kind.args[:1], kind)
        at = builder.gep(self._at(ahead, BYTE), [builder.mul(k, step)])
        read, second_level, data = INT(0), INT(2), INT(1)
        size = COLUMNS * (2 if self.low else 4)
        for line in range(0, size, LINE):
            builder.call(prefetch, [builder.gep(at, [INT(line)]), read, second_level, data])

    def end(self, y: Any, stride: Any) -> None:
        builder, size = self.builder, 2 if self.low else 4
        for r, sums in enumerate(self.sums):
            for half, total in enumerate(sums):
                value = builder.load(total)
                if self.low:
                    value = self._rounded(value)
                elements = builder.mul(stride, stride.type(r))
                at = builder.add(elements, stride.type(half * LANES))
                byte = builder.gep(self._at(y, BYTE), [builder.mul(at, at.type(size))])
                builder.store(value, builder.bitcast(byte, value.type.as_pointer()), align=size)

    def _rounded(self, value: Any) -> Any:
        """The upper halves of float32s, rounded to the nearest, ties to even.

        NaNs stay such: those that a sum has of bfloat16 have no bits in their lower halves.
        """
        builder = self.builder
        bits = builder.bitcast(value, INTS)
        odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
        up = builder.lshr(builder.add(builder.add(bits, _ints(0x7FFF)), odd), _ints(16))
        return builder.trunc(up, ir.VectorType(ir.IntType(16), LANES))

    def _at(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())


def _ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)
