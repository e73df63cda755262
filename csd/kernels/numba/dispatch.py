"""numba's dispatcher of a loop, which compiles what only other loops call as part of these.

numba compiles each function that a compiled function calls by itself: to machine code, and to a
wrapper by which Python calls it. It then compiles the function once more within its caller. Here a
function that a loop calls becomes LLVM code alone, which its callers contain. It is compiled to
machine code of its own when Python calls it.

numba also compiles a function for each constant that it is called with; here a constant has the
type of any other number.
"""

from typing import Any

from numba.core import event, types, typing
from numba.core.compiler import Flags
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler
from numba.core.registry import CPUDispatcher


class _PartCompiler(_FunctionCompiler):
    """Compiles a function to LLVM code for its callers: no machine code, no wrapper for Python."""

    def _customize_flags(self, flags: Flags) -> Flags:
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags


class LoopDispatcher(CPUDispatcher):
    """Dispatcher of a loop: `overloads` are called from Python, and `parts` from other loops."""

    def __init__(self, py_func: Any, *, targetoptions: dict[str, Any]):
        super().__init__(py_func, targetoptions=targetoptions)
        self.parts: dict[tuple[types.Type, ...], Any] = {}
        inner = self._compiler
        self._part_compiler = _PartCompiler(
            py_func, inner.targetdescr, targetoptions, inner.locals, inner.pipeline_class
        )

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Returns numba's template of a call from another loop, compiled for these types."""
        pysig, folded = self.fold_argument_types(args, kws)
        folded = tuple(map(without_constants, folded))
        part = self.part(folded)
        template = typing.make_concrete_template(
            f"CallTemplate({self.py_func.__name__})",
            key=self.py_func.__name__,
            signatures=[part.signature],
        )
        return template, pysig, folded, {}

    def get_overload(self, sig: Any) -> Any:
        """Returns the key by which numba finds the code for a call from another loop."""
        return self.part(tuple(map(without_constants, sig))).entry_point

    def part(self, args: tuple[types.Type, ...]) -> Any:
        """The code of a call from another loop, compiled for these types."""
        with global_compiler_lock:
            if args not in self.parts:
                details = dict(dispatcher=self, args=args, return_type=None)
                with self._compiling_counter, event.trigger_event("numba:compile", data=details):
                    self.parts[args] = self._compile_part(args)
        return self.parts[args]

    def _compile_part(self, args: tuple[types.Type, ...]) -> Any:
        compiled = self._part_compiler.compile(args, None)
        library = compiled.library

        def keep() -> None:
            # numba would pass the code to LLVM's code generator
            library._finalize_dynamic_globals()
            library._finalized = True

        library._finalize_final_module = keep
        # numba identifies the code of a function by the address of its machine code
        compiled = compiled._replace(entry_point=object())
        self.targetctx.insert_user_function(compiled.entry_point, compiled.fndesc, [library])
        return compiled


def without_constants(kind: Any) -> Any:
    """The type of any value where `kind` is the type of one constant."""
    if isinstance(kind, types.BaseTuple) and not isinstance(kind, types.BaseNamedTuple):
        return types.BaseTuple.from_types([without_constants(x) for x in kind.types])
    return types.unliteral(kind)
