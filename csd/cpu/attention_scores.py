"""Attention weights of a row if a call has a window, a chunk, a cap or sinks.

The formula is in `csd/kernels/tree_attention/reference.py`. A row's sums begin at its first key:
earlier keys get weights of zero and do not affect the order in which later ones are added.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic, overload

from csd.cpu.compiled import loop
from csd.cpu.loop_math import exp
from csd.cpu.softmax import weights

# tanh(x) = x + x z P(z), z = x^2, P by least squares of the relative error up to 0.625
NEAR = 0.6
FACTORS = tuple(
    np.float32(x) for x in (-5.71705e-3, 2.0650593e-2, -5.37435e-2, 0.13331491, -0.33333284)
)


class Properties(NamedTuple):
    """Properties of a call in the form in which a loop takes them."""

    # 0 where there is none
    window: int
    chunk: int
    softcap: float
    sinks: np.ndarray  # [H], or [0]


def properties_of(
    kind: type, window: int | None, chunk: int | None, softcap: float | None,
    sinks: torch.Tensor | None,
) -> Properties | None:  # fmt: skip
    """A call's properties, None for a plain call; kind: numpy's type of the scores."""
    if window is chunk is softcap is sinks is None:
        return None
    given = np.empty(0, kind) if sinks is None else sinks.detach().double().numpy().astype(kind)
    return Properties(window or 0, chunk or 0, kind(softcap or 0), given)


def first_key(properties: Any, old: int, word: int) -> int:
    """Position of the first key that a row sees, after `old` tokens; word: bits of its path."""


@overload(first_key)
def _first_key(properties, old, word):
    if isinstance(properties, types.NoneType):
        return lambda properties, old, word: 0

    def first(properties, old, word):
        position, begin = old + count(word) - 1, 0
        if properties.window:
            begin = max(position - properties.window + 1, 0)
        if properties.chunk:
            begin = max(position - position % properties.chunk, begin)
        return begin

    return first


@loop
def first_own(properties, prompt, length):
    """Index of the first committed token that a tree's root sees; other rows see no earlier one."""
    return min(max(first_key(properties, prompt + length, 1) - prompt, 0), length)


@loop
def weigh(x, scale, old, nodes, word, sums, first, properties, head):
    """`softmax` over the keys from column `first` on; earlier keys get weights of zero.

    first may exceed `old`, the number of keys before the nodes: then the earliest nodes of the
    row's path are hidden. Returns the sum of the weights, with that of the head's sink.
    """
    hidden = min(first, old)
    for _ in range(first - hidden):
        word &= word - 1
    x[:hidden] = 0
    shown = x[hidden:]
    if properties.softcap > 0:
        _cap(shown[: old - hidden + nodes], scale, properties.softcap)
        scale = type(scale)(1)
    total, most = weights(shown, scale, old - hidden, nodes, word, sums)
    if properties.sinks.shape[0]:
        total += exp(properties.sinks[head] - most * scale)
    return total


@loop
def _cap(x, scale, cap):
    """x = cap tanh(x scale / cap), in place."""
    for j in range(x.shape[0]):
        x[j] = cap * tanh(x[j] * scale / cap)


def tanh(x: Any) -> Any:
    """tanh x; in float32 within two ulp."""


@overload(tanh)
def _tanh(x):
    if x == types.float64:
        return lambda x: math.tanh(x)
    border, one = np.float32(NEAR), np.float32(1)
    a, b, c, d, e = FACTORS

    def single(x):
        z = x * x
        near = x + x * (z * ((((a * z + b) * z + c) * z + d) * z + e))
        size = abs(x)
        far = one - (one + one) / (exp(size + size) + one)
        return near if size < border else (far if x > 0 else -far)

    return single


@intrinsic
def count(typing_context, word):
    """Number of set bits of a word."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate
