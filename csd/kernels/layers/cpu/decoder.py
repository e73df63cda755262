"""All layers of a step in one call, if there is a loop for each of their operations.

`Decoder.forward` calls nine operations per layer, and the Python code between them takes as long as
a small model's norms and attention. Results equal those of separate operations to the bit.
"""

from collections import namedtuple
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from csd.kernels.attention.cpu.attention import attend_rows, attention_kinds, shares
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.layers.cpu.elementwise import EXP, gate_rows, norm_rows, rms_norm, rotate_rows
from csd.kernels.layers.cpu.linear import (
    QUANTIZED,
    in_loops,
    multiply_by,
    numbers,
    scratch_size,
)
from csd.kernels.layers.cpu.lora import Stacks, add_lora
from csd.kernels.layers.quantized import Quantized, has_loop
from csd.kernels.layers.quantized.cpu.product import table_of
from csd.kernels.layers.quantized.cpu.round_rows import workspace_size
from csd.kernels.numba.isa import instruction
from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, memory, readable
from csd.kernels.numba.threads import parts_for
from csd.kernels.numba.tiles import ISA
from csd.state.kv_cache import PAGE

norm, rotary, swiglu, attention = (x.run for x in (norm_rows, rotate_rows, gate_rows, attend_rows))
# weights of a layer, in the order in which the loop reads them
WEIGHTS = "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "post_norm", "gate_up", "down"
INPUT_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, POST_NORM, GATE_UP, DOWN = range(len(WEIGHTS))
# addresses of the first layer's tensors, or bytes from one layer's to the next one's
Caches = namedtuple("Caches", "node_k node_v k v")
PRODUCTS = "qkv", "out", "gate_up", "down"
# buffers begin at multiples of this many numbers
ALIGNED = 32


@loop
def _layers(
    sizes,  # L, M, hidden, H, K, D, F, n_pages
    threads,  # number for norms, rotary embedding, attention, SwiGLU, and each of `PRODUCTS`
    weights,  # [L, 9] addresses of `WEIGHTS`, 0 for none
    eps,
    residual,  # [M, hidden], the embeddings; written: the residual without the last layer's output
    x,  # [M, hidden], written: the last layer's output
    buffers,  # [M, ..]: normed hidden, qkv (H + 2 K) D, q H D, attended H D, gate_up 2 F, gated F
    transposed,  # workspace of products, float32
    rotation,  # positions [M], cos and sin
    caches,  # `Caches` of addresses
    strides,  # `Caches` of bytes
    attention_options,  # of `attend_rows`: kinds, scale, None, shares, layout
    like,
    plain,  # kind of the weights, as `multiply_by` takes it: only its loop is compiled
    isa,  # the instruction of products, one of `tiles.ISA`
    lora,  # `Lora`, or None
):
    """All layers of a decoder; tensors are addresses, except `weights` and the positions."""
    L, M, hidden, H, K, D, F, pages = sizes
    normed, qkv, q, attended, gate_up, gated = buffers
    norms, rotates, attends, gates, by_qkv, by_out, by_gate_up, by_down = threads
    size, width = like.itemsize, (H + 2 * K) * D
    memory(attended, M * H * D, like)[:] = 0
    for i in range(L):
        w = weights[i]
        node_k, node_v = caches.node_k + i * strides.node_k, caches.node_v + i * strides.node_v
        k, v = caches.k + i * strides.k, caches.v + i * strides.v
        other = residual if i else 0
        first = x if i else residual
        norm(norms, M, hidden, first, other, w[INPUT_NORM], eps, normed, residual, like, False)
        shape = M, width, hidden
        multiply_by(plain, by_qkv, shape, normed, transposed, w[QKV], w[QKV_BIAS], qkv, like, isa)
        add_lora(lora, i, 0, shape, normed, qkv, transposed, like)
        k_at, v_at = qkv + H * D * size, qkv + (H + K) * D * size
        if w[Q_NORM]:
            for m in range(M):
                offset = m * width * size
                norm(1, H, D, qkv + offset, 0, w[Q_NORM], eps, qkv + offset, 0, like, False)
                norm(1, K, D, k_at + offset, 0, w[K_NORM], eps, k_at + offset, 0, like, False)
        shape, widths = (M, H, K, D, D), (width, width, width)
        rotary(rotates, shape, qkv, k_at, v_at, widths, *rotation, q, node_k, node_v, like)
        shape = M, H, K, D, D, pages
        attention(attends, shape, q, node_k, node_v, k, v, attended, *attention_options)
        shape = M, hidden, H * D
        multiply_by(plain, by_out, shape, attended, transposed, w[OUT], 0, x, like, isa)
        add_lora(lora, i, 1, shape, attended, x, transposed, like)
        norm(norms, M, hidden, x, residual, w[POST_NORM], eps, normed, residual, like, False)
        shape = M, 2 * F, hidden
        multiply_by(plain, by_gate_up, shape, normed, transposed, w[GATE_UP], 0, gate_up, like, isa)
        add_lora(lora, i, 2, shape, normed, gate_up, transposed, like)
        swiglu(gates, M, F, gate_up, gated, like, False)
        shape = M, hidden, F
        multiply_by(plain, by_down, shape, gated, transposed, w[DOWN], 0, x, like, isa)
        add_lora(lora, i, 3, shape, gated, x, transposed, like)


class _Weights(NamedTuple):
    """A decoder's weights in the form in which the loop reads them."""

    addresses: np.ndarray  # [L, 9]
    kind: Any  # of its matrices, as `multiply_by` takes it
    held: list  # the tensors at these addresses
    biases: tuple[list, list]  # float32 copies, and the biases that they are copied from


_weights_of: WeakKeyDictionary[Any, _Weights | None] = WeakKeyDictionary()
_adapters: WeakKeyDictionary[Any, Stacks | None] = WeakKeyDictionary()


def forward(
    decoder: Any,
    token: torch.Tensor,  # [M] int32
    position: torch.Tensor,  # [M] int32
    attend: Any,
    node_k: torch.Tensor,  # [L, M, K, D], written
    node_v: torch.Tensor,  # [L, M, K, D], written
) -> torch.Tensor | None:
    """Output of `Decoder.forward`, [M, hidden]; None where no loop fits.

    That is for a decoder or attention of another kind, and for weights that `_weights` refuses.
    """
    if not isinstance(attend, LayerAttention) or not getattr(decoder, "is_plain", False):
        return None
    if decoder not in _weights_of:
        _weights_of[decoder] = _weights(decoder)
        _adapters[decoder] = Stacks.of(decoder, PRODUCTS)
    weights, stacks, c = _weights_of[decoder], _adapters[decoder], decoder.config
    if weights is None or stacks is None:
        return None
    if not readable(decoder.norm, node_k, node_v, attend.k, attend.v):
        return None
    M, H, K, D, wide = token.shape[0], c.heads, c.kv_heads, c.head_dim, c.intermediate
    decoder.follow()
    if weights.kind is True and weights.biases[0]:
        # a module's own biases may have changed since the last step
        torch._foreach_copy_(*weights.biases)
    residual = F.embedding(token.clamp(min=0), decoder.embedding)
    x, *buffers = _buffers(
        M, (c.hidden, c.hidden, (H + 2 * K) * D, H * D, H * D, 2 * wide, wide), residual.dtype
    )
    widest = max(c.hidden, H * D, wide)
    size = 4 * scratch_size(M, widest, weights.kind is True)
    if weights.kind is QUANTIZED:
        size = max(size, workspace_size(M, widest))
    transposed = torch.empty(size, dtype=torch.uint8)
    layer = decoder.layers[0]
    products = (numbers(getattr(layer, name), M) for name in PRODUCTS)
    counts = M * c.hidden, M * H * D, M * H * D * PAGE, EXP * M * wide, *products
    lora, _kept = stacks.for_rows(M)
    each = tuple(map(parts_for, counts))
    caches = node_k, node_v, attend.k, attend.v
    kinds, scale = attention_kinds(residual.dtype, D), np.float32(attend.scale)
    _layers(
        (c.layers, M, c.hidden, H, K, D, wide, attend.k.shape[1]),
        each,
        weights.addresses,
        np.float32(c.norm_eps),
        residual.data_ptr(),
        x.data_ptr(),
        tuple(y.data_ptr() for y in buffers),
        transposed.data_ptr(),
        (position.numpy(), decoder.cos.data_ptr(), decoder.sin.data_ptr()),
        Caches(*[y.data_ptr() for y in caches]),
        Caches(*[y.stride(0) * y.element_size() for y in caches]),
        (kinds, scale, None, shares(attend.work, K), attend.work),
        LIKE[residual.dtype],
        weights.kind,
        ISA[instruction(residual.dtype)],
        lora,
    )
    return rms_norm(x.view(M, c.hidden), decoder.norm, c.norm_eps, residual)[0]


def _buffers(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Buffers [rows * width] of one allocation, each at the start of a cache line."""
    sizes = [-(-rows * n // ALIGNED) * ALIGNED for n in widths]
    parts = torch.empty(sum(sizes), dtype=dtype).split(sizes)
    return tuple(x[: rows * n] for x, n in zip(parts, widths, strict=True))


def _weights(decoder: Any) -> _Weights | None:
    """The weights as `_Weights`; None if the loops of products refuse one or a dtype differs."""
    products = [getattr(layer, name) for layer in decoder.layers for name in PRODUCTS]
    kinds = {_kind(x) for x in products}
    if len(kinds) > 1 or None in kinds:
        return None
    kind = {"plain": True, "laid out": None, "quantised": QUANTIZED}[kinds.pop()]
    held: list[Any] = []
    biases: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    addresses = []
    for layer, name in product(decoder.layers, WEIGHTS):
        weight = getattr(layer, name)
        if weight is None:
            addresses.append(0)
        elif isinstance(weight, Quantized):
            held.extend((weight, table := table_of(weight)))
            addresses.append(table.ctypes.data)
        elif weight.dtype != decoder.norm.dtype or not weight.is_contiguous():
            return None
        else:
            held.append(weight.float() if name == "qkv_bias" else weight)
            if held[-1] is not weight:
                biases[0].append(held[-1])
                biases[1].append(weight)
            addresses.append(held[-1].data_ptr())
    return _Weights(np.array(addresses).reshape(-1, len(WEIGHTS)), kind, held, biases)


def _kind(weight: torch.Tensor) -> str | None:
    if isinstance(weight, Quantized):
        return "quantised" if has_loop() else None
    return (("laid out", "plain")[weight.dim() == 2]) if in_loops(weight) else None
