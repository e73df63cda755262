"""Records of tensors, and views of them.

A field of a record is declared once, by `tensor`: the dimensions of its shape, its dtype, and its
value when nothing is written yet. A `View` names the fields that an operation reads and writes, and
goes as it is into every backend, as a namedtuple of these fields:

    reference       tensors or arrays   view(record), view.arrays(record)
    loop on a CPU   addresses           view.addresses(record), for `csd.kernels.numba.records`
    Triton kernel   pointers            view(record), as one argument

`view.check` compares tensors with what was declared.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch

Kind = TypeVar("Kind", bound=type)
# types of tensors that have memory; other types may stand for a tensor elsewhere, or not made yet
PLAIN = (torch.Tensor, torch.nn.Parameter)
# fields of NamedTuples that are declared by `tensor`
_NAMED: dict[type, Mapping[str, Any]] = {}


def tensor(shape: str, dtype: torch.dtype | None = torch.int32, fill: float = 0) -> Any:
    """A field: its dimensions (letters, numbers or "G+1"), dtype and value in a new record.

    dtype None stands for any floating-point one.
    """
    dims = tuple(int(d) if d.isdigit() else d for d in shape.split())
    return field(metadata={"shape": dims, "dtype": dtype, "fill": fill})


def named(kind: Kind) -> Kind:
    """Decorator of a NamedTuple whose fields are declared by `tensor`; none has a default."""
    _NAMED[kind] = kind._field_defaults  # type: ignore[attr-defined]
    kind.__new__.__defaults__ = None
    return kind


class Declared(NamedTuple):
    """A field's dimensions, dtype (None: any floating-point one), and value in a new record."""

    shape: tuple[Any, ...]
    dtype: torch.dtype | None
    fill: float


@cache
def declared(record: type) -> dict[str, Declared]:
    """Declarations of a record's tensors."""
    of: Any = record
    every = {f.name: f for f in fields(of)} if is_dataclass(of) else _NAMED[of]
    return {n: Declared(**f.metadata) for n, f in every.items() if "shape" in f.metadata}


def allocate(
    record: type,
    sizes: Mapping[str, int],
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
    filled: bool = False,
) -> dict[str, Any]:
    """Tensors of all fields, uninitialized or filled; dtype: of fields with any floating-point one.

    sizes: size by dimension letter.
    """
    made: dict[str, Any] = {}
    for name, (dims, kind, fill) in declared(record).items():
        # nearly all dimensions are letters
        shape: list[Any] = [sizes[d] if d in sizes else _size(d, sizes) for d in dims]
        new = torch.zeros if filled and not fill else torch.empty
        made[name] = new(shape, dtype=kind or dtype, device=device)
        if filled and fill:
            made[name].fill_(fill)
    return made


class View:
    """The fields of a record that an operation reads and writes; all, if none are named."""

    def __init__(self, record: type, reads: str = "", writes: str = ""):
        of: Any = record
        every, self.record, self.writes = declared(record), record, tuple(writes.split())
        self.names = (*self.writes, *reads.split()) or tuple(every)
        # fields that are no tensors
        others = [f for f in fields(of) if f.name not in every] if is_dataclass(of) else []
        self._defaults = {f.name: f.default for f in others if f.default is not MISSING}
        self._is_whole = self.names == tuple(every) and len(self._defaults) == len(others)
        self.fields = {name: every[name] for name in self.names}
        self.kind = _namedtuple(record.__name__, self.names)
        self._get = attrgetter(*self.names, self.names[0])
        self._dtypes = [f.dtype for f in self.fields.values()]

    @property
    def name(self) -> str:
        return self.record.__name__.lower()

    def __call__(self, record: Any) -> Any:
        """The record's tensors, as a namedtuple."""
        return self.kind(*self._get(record)[:-1])

    def arrays(self, record: Any) -> Any:
        """The tensors as numpy arrays: views of CPU tensors, copies of others."""
        tensors = self._get(record)[:-1]
        return self.kind(*[x.numpy() if x.is_cpu else x.numpy(force=True) for x in tensors])

    def addresses(self, record: Any, dtype: torch.dtype | None = None) -> Any | None:
        """The tensors' addresses; dtype: of fields with any floating-point one.

        Returns None if a tensor has another dtype, is not contiguous or not in the CPU's memory.
        """
        pointers = []
        for x, wanted in zip(self._get(record), self._dtypes, strict=False):
            plain = type(x) in PLAIN and x.is_cpu and x.is_contiguous()
            if not plain or x.dtype is not (wanted or dtype):
                return None
            pointers.append(x.data_ptr())
        return self.kind(*pointers)

    def restored(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A record of the view's tensors, with `rows` and `count` for its sizes M and S.

        It is of the record's own class if that needs no other fields.
        """
        values: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        if self._is_whole:
            return self.record(**values)
        sizes = {f.shape[0]: values[name].shape[0] for name, f in self.fields.items()}
        sizes = {name: sizes[d] for name, d in (("rows", "M"), ("count", "S")) if d in sizes}
        return SimpleNamespace(**values, **self._defaults, **sizes)

    def check(
        self,
        record: Any,
        sizes: dict[str, int],
        device: torch.device,
        prefix: str | None = None,
        any_layout: bool = False,
    ) -> None:
        """Checks the record's tensors with `check_tensor`.

        sizes: size by dimension letter; a missing letter is added in place from the first field
        that has it. prefix: of names in errors, by default the record's name.
        """
        prefix = f"{self.name}." if prefix is None else prefix
        for name, f in self.fields.items():
            x, dims = getattr(record, name), f.shape
            if x.dim() == len(dims):
                for d, n in zip(dims, x.shape, strict=True):
                    if isinstance(d, str) and "+" not in d:
                        sizes.setdefault(d, n)
            shape = [_size(d, sizes) for d in dims]
            check_tensor(f"{prefix}{name}", x, shape, f.dtype, device, any_layout=any_layout)


def _namedtuple(name: str, names: tuple[str, ...]) -> Any:
    """A namedtuple by which another process finds compiled loops: its name follows from `names`."""
    name = f"{name}_{crc32(' '.join(names).encode()):08x}"
    return globals().setdefault(name, namedtuple(name, names, module=__name__))


def _size(dim: str | int, sizes: Mapping[str, int]) -> int | None:
    """Size of a dimension such as "S", "G+1" or 8; None while it is not known."""
    if isinstance(dim, int):
        return dim
    if dim in sizes:
        return sizes[dim]
    letter, _, more = dim.partition("+")
    return sizes[letter] + int(more) if more and letter in sizes else None


def on_host(*tensors: torch.Tensor) -> bool:
    """True if loops can read the memory of all tensors, of any dtypes."""
    return all(type(x) in PLAIN and x.is_cpu for x in tensors)


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    device: torch.device,
    rows_apart: bool = False,
    any_layout: bool = False,
) -> None:
    """Raises ValueError unless `x` has this shape, dtype, device and layout; reads no memory.

    Kernels read memory by the shape and layout that they expect: a tensor of another one would not
    fail there but give wrong numbers.

    None in `shape` allows any size, None as `dtype` any floating-point dtype. x must be contiguous;
    with rows_apart only x[0] must be, with any_layout neither.
    """
    actual = x.shape
    # a single comparison in the usual case of equal shapes
    if actual != shape and (
        len(actual) != len(shape)
        or any(n is not None and n != m for n, m in zip(shape, actual, strict=True))
    ):
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        sizes += "," * (len(shape) == 1)
        raise ValueError(f"{name} must have shape ({sizes}), got {tuple(actual)}")
    if dtype is None and not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    # slicing is slow, and x is contiguous in most calls, so that is tested first
    if any_layout or x.is_contiguous() or (rows_apart and x[:1].is_contiguous()):
        return
    what = f"rows of {name}" if rows_apart else name
    raise ValueError(f"{what} must be contiguous, got strides {x.stride()}")
