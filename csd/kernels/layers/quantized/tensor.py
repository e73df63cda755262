"""A quantised matrix as a tensor: a weight for Linear layers, embeddings, peft and autograd."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from csd.kernels.common.cpu import compiles
from csd.kernels.layers.quantized.formats import (
    FORMATS,
    PAIR,
    TILE,
    Format,
    lay_out,
    rows_of,
    tiles_of,
)

# bytes of a file that are laid out at once; without loops, few enough for the CPU's caches
AT_ONCE, AT_ONCE_REF = 1 << 20, 1 << 16


class Part(NamedTuple):
    """Consecutive rows of one type."""

    format: str  # a name in `FORMATS`
    rows: int
    data: torch.Tensor  # [tiles, bytes of a tile] uint8, as `formats.lay_out` makes it


class _InBlocks(torch.Tensor):
    """A tensor whose numbers are not in a storage of its own."""

    stored: tuple[torch.Tensor, ...]  # the plain tensors with its numbers

    def _held(self) -> tuple[Any, ...]:
        """Arguments that make it again, over the same memory."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(x.numel() for x in self.stored)

    def data_ptr(self) -> int:
        return self.stored[0].data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = _made(type(self), self._held(), isinstance(self, nn.Parameter))
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made, (type(self), self._held(), isinstance(self, nn.Parameter))

    def untyped_storage(self) -> Any:
        raise NotImplementedError(
            "a quantised weight has no storage of float32: its file holds it; save adapters alone, "
            "or take its dequantize()"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        where = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            dtype, device = where.get("dtype"), where.get("device")
            if dtype not in (None, torch.float32) or (
                device and torch.device(device).type != "cpu"
            ):
                raise NotImplementedError(
                    "a quantised weight stays on the CPU, in float32, got "
                    f"{torch.float32 if dtype is None else dtype} on {device or 'cpu'}; read its "
                    "file with a dtype"
                )
        elif func not in _ALIASES:
            raise NotImplementedError(
                f"{func} does not read a quantised weight; take its dequantize()"
            )
        return cls(*args[0]._held())


def _made(cls: Any, held: tuple[Any, ...], is_parameter: bool) -> Any:
    made = cls(*held)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


class Quantized(_InBlocks):
    """A matrix [N, K] in blocks of a GGUF file, as a float32 tensor without gradient.

    `F.linear` and `F.embedding` take it, and gradients reach x; `x @ W` is what these gradients
    need, and has none of its own. `dequantize()` is the float32 matrix. No other operation reads
    its numbers, and none writes them, so copies share them.
    """

    parts: tuple[Part, ...]

    def __new__(cls, parts: Iterable[Part], K: int) -> "Quantized":
        parts = tuple(parts)
        size = sum(part.rows for part in parts), K
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)
        made.parts = parts
        return made

    @classmethod
    def of_file(cls, rows: Any, format: Format) -> "Quantized":
        """A matrix of a file; rows: [N, bytes of a row] uint8, of which slices are read."""
        N, width = rows.shape
        K = width // format.size * format.numbers
        data = torch.empty(tiles_of(N), format.tile_size(K), dtype=torch.uint8)
        out, in_loop = data.numpy(), compiles()
        each = max(1, (AT_ONCE if in_loop else AT_ONCE_REF) // (width * PAIR)) * PAIR

        def fill(first: int) -> None:
            part = out[first // TILE : (first + each) // TILE]
            if in_loop:
                from csd.kernels.layers.quantized.cpu import lay_out as loop

                loop.lay_out(rows[first : first + each], format, part)
            else:
                part[:] = lay_out(rows[first : first + each], format)

        # reading waits for the disk, and neither it nor the loop holds Python's lock
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(fill, range(0, N, each)):
                pass
        return cls([Part(format.name, N, data)], K)

    @classmethod
    def cat(cls, weights: Iterable["Quantized"]) -> "Quantized":
        """Matrices one below the other; their memory is shared."""
        weights = list(weights)
        return cls([part for w in weights for part in w.parts], weights[0].shape[1])

    def split(self, rows: list[int], dim: int = 0) -> list["Quantized"]:  # type: ignore[override]
        """Matrices of so many rows each, of which `cat` made this one."""
        parts, out = list(self.parts), []
        for count in rows:
            own: list[Part] = []
            while sum(part.rows for part in own) < count:
                own.append(parts.pop(0))
            out.append(Quantized(own, self.shape[1]))
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids [..] of the matrix, [.., K] float32. Raises IndexError for others."""
        flat = ids.reshape(-1).numpy()
        if ((flat < 0) | (flat >= self.shape[0])).any():
            raise IndexError(
                f"ids must be rows 0 to {self.shape[0] - 1}, got {flat.min()} to {flat.max()}"
            )
        out = np.empty((len(flat), self.shape[1]), np.float32)
        first = 0
        for part in self.parts:
            mine = (flat >= first) & (flat < first + part.rows)
            if mine.any():
                own, format = flat[mine] - first, FORMATS[part.format]
                out[mine] = rows_of(part.data.numpy(), format, self.shape[1], own)
            first += part.rows
        return torch.from_numpy(out).view(*ids.shape, -1)

    def dequantize(self) -> torch.Tensor:
        """The matrix [N, K] in float32."""
        return self.rows(torch.arange(self.shape[0]))

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(part.data for part in self.parts)

    def _held(self) -> tuple[Any, ...]:
        return self.parts, self.shape[1]

    def __repr__(self) -> str:  # type: ignore[override]
        kinds = "+".join(dict.fromkeys(part.format for part in self.parts))
        return f"Quantized({kinds}, {tuple(self.shape)}, {self.bytes} bytes)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            return _FUNCTIONS[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class QuantizedStack(_InBlocks):
    """Matrices of one shape, [E, N, K]; an index gives one of them."""

    matrices: tuple[Quantized, ...]

    def __new__(cls, matrices: Iterable[Quantized]) -> "QuantizedStack":
        matrices = tuple(matrices)
        size = len(matrices), *matrices[0].shape
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)
        made.matrices = matrices
        return made

    def __getitem__(self, index: Any) -> Any:
        return self.matrices[index]

    def __iter__(self) -> Any:
        return iter(self.matrices)

    def unbind(self, dim: int = 0) -> tuple[Quantized, ...]:
        return self.matrices

    def dequantize(self) -> torch.Tensor:
        """The matrices [E, N, K] in float32."""
        return torch.stack([x.dequantize() for x in self.matrices])

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(data for x in self.matrices for data in x.stored)

    def _held(self) -> tuple[Any, ...]:
        return (self.matrices,)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedStack({len(self.matrices)} x {self.matrices[0]})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def stored(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The plain tensors with a tensor's numbers: x itself, or the parts of a quantised one."""
    return x.stored if isinstance(x, Quantized | QuantizedStack) else (x,)


# what `Parameter` and `.data` call
_ALIASES = torch.ops.aten.detach.default, torch.ops.aten.alias.default


class _Linear(torch.autograd.Function):
    """The product, with the gradient of the dequantised matrix and an unrounded x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        from csd.kernels.layers.quantized import quantized_linear

        ctx.weight = weight()
        return quantized_linear(x, ctx.weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        of_x, _, of_bias = ctx.needs_input_grad
        (grad,) = grads
        return (
            grad @ ctx.weight if of_x else None,
            None,
            grad.flatten(0, -2).sum(0) if of_bias else None,
        )


def _linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    # autograd records tensors among the arguments, and a function is none
    out: torch.Tensor = _Linear.apply(input, lambda: weight, bias)
    return out


def _matmul(x: torch.Tensor, weight: Any) -> torch.Tensor:
    from csd.kernels.layers.quantized import quantized_matmul

    return quantized_matmul(x, weight)


_FUNCTIONS: dict[Any, Callable] = {
    F.linear: _linear,
    F.embedding: lambda input, weight, *_, **__: weight.rows(input),
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.matmul: _matmul,
    torch.Tensor.dequantize: Quantized.dequantize,
}
