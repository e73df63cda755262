"""Loops that run in PyTorch's number of threads.

A loop divides its work into parts. One thread runs the only part, or each of several threads runs
one, by the same machine code: `in_parts` calls it from OpenMP's threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from types import FunctionType
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from csd.kernels.numba.dispatch import without_constants
from csd.kernels.numba.jit import loop

# numbers that a loop must compute to run in several threads: below, a second thread gains little,
# and loses much where another process uses its core
LEAST = 1 << 17
BYTES, INDEX, STATUS = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(1)


@dataclass(frozen=True, slots=True)
class ByThreads:
    """A loop that divides its work: `part` runs one part, `run` a number of them at once."""

    part: Any
    run: Any

    def __call__(self, numbers: int, *args: Any) -> Any:
        """Run as many parts as suit `numbers`, the amount of numbers that the call computes."""
        return self.run(parts_for(numbers), *args)


def by_threads(function: Callable) -> ByThreads:
    """`function(part, parts, ..)`, which runs one part, as a loop that runs all parts at once."""
    part, name = loop(function), f"{function.__name__}_in_parts"
    names = ", ".join(list(signature(function).parameters)[2:])
    text = f"def {name}(parts, {names}):\n    in_parts(parts, part, ({names},))\n"
    # numba's cache identifies a function by its file, line and name
    above = "\n" * (function.__code__.co_firstlineno - 1)
    made = compile(above + text, function.__code__.co_filename, "exec").co_consts[0]
    run = FunctionType(made, {"in_parts": in_parts, "part": part}, name)
    run.__module__, run.__qualname__ = function.__module__, name
    return ByThreads(part, loop(run))


@loop
def share(count, part, parts):
    """Begin and end of a part's share of `count` indices."""
    return count * part // parts, count * (part + 1) // parts


@intrinsic
def in_parts(typing_context, parts, function, args):
    """function(part, parts, *args) for each part from 0 to parts - 1, each in its own thread.

    Raises RuntimeError if a part raises an error.
    """
    called = (types.intp, types.intp, *map(without_constants, args))
    function.get_call_type(typing_context, called, {})

    def generate(context, builder, signature, values):
        parts, _, packed = values
        code = function.dispatcher.part(called)
        context.add_linking_libs([code.library])
        operands = cgutils.unpack_tuple(builder, packed, len(args))
        operands = [
            context.cast(builder, value, kind, to)
            for value, kind, to in zip(operands, args, called[2:], strict=True)
        ]
        record = ir.LiteralStructType([INDEX, STATUS, *(value.type for value in operands)])
        data = cgutils.alloca_once(builder, record)
        for i, value in enumerate((parts, STATUS(0), *operands)):
            builder.store(value, cgutils.gep_inbounds(builder, data, 0, i))
        kernel = _kernel(context, builder.module, code.fndesc, record)
        nothing, address = BYTES(None), builder.bitcast(data, BYTES)
        single = builder.icmp_signed("==", parts, INDEX(1))
        with builder.if_else(single) as (alone, together):
            with alone:
                none = INDEX.as_pointer()(None)
                builder.call(kernel, [BYTES.as_pointer()(None), none, none, address])
            with together:
                # one argument, at address 0 for part 0 and at address i for part i
                pointers = cgutils.alloca_once_value(builder, nothing)
                sizes = cgutils.alloca_once(builder, INDEX, 2)
                builder.store(parts, sizes)
                builder.store(INDEX(1), builder.gep(sizes, [INDEX(1)]))
                step = cgutils.alloca_once_value(builder, INDEX(1))
                kind = ir.FunctionType(ir.VoidType(), [BYTES] * 5 + [INDEX] * 3)
                start = cgutils.get_or_insert_function(builder.module, kind, "numba_parallel_for")
                pointed = [builder.bitcast(x, BYTES) for x in (kernel, pointers, sizes, step)]
                builder.call(start, [*pointed, address, INDEX(1), INDEX(1), parts])
        failed = builder.load(cgutils.gep_inbounds(builder, data, 0, 1))
        with cgutils.if_unlikely(builder, failed):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a part of a loop failed",))
        return context.get_dummy_value()

    return types.none(types.intp, function, args), generate


def _kernel(context: Any, module: Any, code: Any, record: ir.Type) -> Any:
    """The function that OpenMP's threads call, in the form that numba's `parallel_for` requires.

    Its first argument points to the address i for part i (null: part 0), its last to `record`.
    """
    name = f"{code.mangled_name}.kernel"
    if name in module.globals:
        return module.globals[name]
    pointers, size = BYTES.as_pointer(), INDEX.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointers, size, size, BYTES])
    kernel = ir.Function(module, kind, name)
    kernel.linkage = "internal"
    builder = ir.IRBuilder(kernel.append_basic_block())
    which, _, _, data = kernel.args
    several = builder.icmp_unsigned("!=", which, pointers(None))
    part = cgutils.alloca_once_value(builder, INDEX(0))
    with builder.if_then(several):
        builder.store(builder.ptrtoint(builder.load(which), INDEX), part)
    data = builder.bitcast(data, record.as_pointer())
    parts, _, *operands = (
        builder.load(cgutils.gep_inbounds(builder, data, 0, i)) for i in range(len(record.elements))
    )
    function = context.declare_function(module, code)
    status, _ = context.call_conv.call_function(
        builder, function, code.restype, code.argtypes, [builder.load(part), parts, *operands]
    )
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(STATUS(1), cgutils.gep_inbounds(builder, data, 0, 1))
    builder.ret_void()
    return kernel


def parts_for(numbers: int) -> int:
    """Number of parts, and so of threads, of a call that computes `numbers` numbers.

    Call it before each call of a loop that may run in several threads, or that calls such a loop.
    """
    _begin()
    return threads() if numbers >= LEAST else 1


@cache
def _begin() -> None:
    """Links the functions of numba's threading layer, once; loops that were cached need them.

    Linking sets the threads of OpenMP, and so of PyTorch, to the number of cores; they are reset.
    """
    count = torch.get_num_threads()
    numba.get_num_threads()
    torch.set_num_threads(count)


def threads() -> int:
    """Number of threads: PyTorch's, at most numba's; 1 if callers cannot share numba's threads."""
    limit: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return min(torch.get_num_threads(), limit) if _shared() else 1


@cache
def _shared() -> bool:
    """True if numba has OpenMP or TBB; two callers of its own thread pool abort the process."""
    return any(find_spec(f"numba.np.ufunc.{name}") for name in ("omppool", "tbbpool"))
