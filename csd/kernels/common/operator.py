"""Operations as PyTorch operators: `torch.ops.csd.<name>`.

An operator runs the operation's launcher on a GPU. On a CPU it runs the loop of the backend "cpu"
if there is one that supports the arguments, else the reference. A loop is imported when its
operator first runs on a CPU. A fake implementation gives PyTorch's tools the shapes of its results.
Its arguments are tensors, lists of tensors and numbers: a record of `csd.state` is packed into the
fields that the operation takes, and unpacked inside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch

from csd.kernels.common.cpu import compiles
from csd.state.record import View, declared

# schema types, by a field's type or by its name where annotations are not evaluated
NUMBERS = {
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    int: "SymInt",
    float: "float",
    bool: "bool",
}


@dataclass
class Implementations:
    """Implementations of an operation, by backend."""

    reference: Callable
    triton: Callable
    # imports the loop of the backend "cpu"; returns the predicate of its arguments and the loop
    import_loop: Callable[[], tuple[Callable[..., bool], Callable]] | None = None
    compiled: bool = True  # numba compiles the loop
    loop: Callable | None = None  # the imported loop
    takes: Callable[..., bool] | None = None  # whether the loop supports the arguments

    def load_loop(self) -> None:
        """Imports the loop, if there is one and it can be compiled on this machine."""
        if self.import_loop is not None:
            if compiles() or not self.compiled:
                self.takes, self.loop = self.import_loop()
            self.import_loop = None

    def on_cpu(self, *args: Any) -> Any:
        self.load_loop()
        if self.loop is not None and self.takes is not None and self.takes(*args):
            return self.loop(*args)
        return self.reference(*args)


@cache
def has_triton() -> bool:
    """True if Triton is installed."""
    return find_spec("triton") is not None


def launcher(load: Callable[[], Callable]) -> Callable:
    """A launcher of Triton kernels that `load` imports at the first call.

    Raises ImportError at a call if Triton is not installed.
    """
    imported = cache(load)

    @wraps(load)
    def launch(*args: Any, **options: Any) -> Any:
        check_triton(load.__name__)
        return imported()(*args, **options)

    return launch


def check_triton(user: str) -> None:
    """Raises ImportError if Triton, which `user` needs, is not installed."""
    if not has_triton():
        raise ImportError(
            f"{user} needs Triton, else kernels='reference' or 'cpu': pip install triton"
        )


# implementations by operation name
OPERATIONS: dict[str, Implementations] = {}


def load_loops() -> None:
    """Imports the loops of all operations that are registered so far."""
    for operation in OPERATIONS.values():
        operation.load_loop()


def operator(
    name: str,
    reference: Callable,
    triton: Callable,
    *,
    loop: Callable[[], tuple[Callable[..., bool], Callable]] | None = None,
    compiled: bool = True,
    written: Sequence[str] = (),
    schema: str | Callable | None = None,
    fake: Callable | None = None,
    unpacked: Callable[[Callable], Callable] = lambda function: function,
) -> Any:
    """Registers csd::name and returns PyTorch's CustomOpDef.

    loop: imports the loop of the backend "cpu"; returns the predicate of the arguments that it
    supports, and the loop. compiled: False if it runs without numba. written: arguments that are
    modified in place. schema: arguments and results in PyTorch's schema syntax, or the function, by
    default the reference, from whose signature it is inferred. fake: returns results of the right
    shape without values; without it the operator returns nothing.
    unpacked: wraps an implementation into a function of the operator's own arguments.
    """
    implementations = OPERATIONS[name] = Implementations(reference, triton, loop, compiled)
    if not isinstance(schema, str):
        schema = torch.library.infer_schema(schema or reference, mutates_args=written)
    if fake is None:
        schema = schema.partition(" -> ")[0] + " -> ()"

    run_on_cpu, launch = unpacked(implementations.on_cpu), unpacked(triton)

    def on_cpu(*args: Any) -> Any:
        result = run_on_cpu(*args)
        return None if fake is None else result

    def on_gpu(*args: Any) -> Any:
        check_triton(f"csd.kernels.{name} on a GPU")
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        with torch.cuda.device_of(first):
            result = launch(*args)
        return None if fake is None else result

    made = torch.library.custom_op(
        f"csd::{name}", on_cpu, mutates_args=written, device_types="cpu", schema=schema
    )
    made.register_kernel("cuda")(on_gpu)
    if fake is not None:
        made.register_fake(fake)
    return made


def numbers(record: type, names: Sequence[str]) -> list[str]:
    """Schema declarations of the numbers `names` of a dataclass."""
    kinds: dict[str, Any] = {f.name: f.type for f in fields(record)}
    return [f"{NUMBERS[kinds[name]]} {name}" for name in names]


class RecordOperator:
    """An operator that is called and implemented with records.

    operands: a `View` of each record, whose tensors are passed as one list, or one by one if some
    are written or the record is a NamedTuple; and schema declarations of other arguments. returns:
    a schema declaration, or the class of a record of tensors. The reference, the launcher and
    `fake` take the operands by position.
    """

    def __init__(
        self,
        name: str,
        operands: Sequence[View | str],
        reference: Callable,
        triton: Callable,
        returns: str | type = "()",
        fake: Callable | None = None,
        loop: Callable[[], tuple[Callable[..., bool], Callable]] | None = None,
    ):
        self.operands, self.returns = tuple(operands), returns
        declared = [
            argument
            for operand in operands
            for argument in ([operand] if isinstance(operand, str) else _arguments(operand))
        ]
        numbered = [a.replace("!", f"(a{i}!)", 1) for i, a in enumerate(declared)]
        result = returns if isinstance(returns, str) else "Tensor[]"
        self.definition = operator(
            name,
            reference,
            triton,
            loop=loop,
            unpacked=self._implementation,
            written=[a.split()[1] for a in declared if "!" in a],
            schema=f"({', '.join(numbered)}) -> {result}",
            fake=fake and self._implementation(fake),
        )

    def _implementation(self, function: Callable) -> Callable:
        def call(*args: Any) -> Any:
            left = list(args)
            values = [
                left.pop(0) if isinstance(operand, str) else _unpacked(operand, left)
                for operand in self.operands
            ]
            result = function(*values)
            if isinstance(self.returns, str):
                # PyTorch does not accept a subclass of tuple
                return tuple(result) if isinstance(result, tuple) else result
            return _tensors(result)

        return call

    def check(self, sizes: dict[str, int], device: torch.device, *records: Any) -> None:
        """Checks the records with `View.check`; they are in the order of the operands."""
        views = [operand for operand in self.operands if isinstance(operand, View)]
        for view, record in zip(views, records, strict=True):
            view.check(record, sizes, device)

    def pack(self, *values: Any) -> list:
        """Returns the operator's own arguments for the operands `values`."""
        args: list = []
        for operand, value in zip(self.operands, values, strict=True):
            if isinstance(operand, View):
                args += operand(value) if _spread(operand) else [[*operand(value)]]
            else:
                args.append(value)
        return args

    def __call__(self, *values: Any) -> Any:
        result = self.definition(*self.pack(*values))
        return result if isinstance(self.returns, str) else self.returns(*result)


def _spread(view: View) -> bool:
    """True if a view's tensors are arguments of their own, and not a list."""
    return bool(view.writes) or issubclass(view.record, tuple)


def _arguments(view: View) -> list[str]:
    """Schema declarations of a view's arguments; Tensor! is one that is written."""
    if not _spread(view):
        return [f"Tensor[] {view.name}"]
    return [f"Tensor{'!' * (name in view.writes)} {name}" for name in view.names]


def _unpacked(view: View, args: list) -> Any:
    """Removes a view's tensors from the front of `args` and returns their record."""
    count = len(view.names) if _spread(view) else 1
    taken, args[:] = args[:count], args[count:]
    return view.restored(taken if _spread(view) else taken[0])


def _tensors(record: Any) -> list[torch.Tensor]:
    if isinstance(record, tuple):
        return list(record)
    kind: Any = type(record)
    return [getattr(record, name) for name in declared(kind)]
