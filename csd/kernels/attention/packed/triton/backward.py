"""The kernels of the packed attention's gradients, which compute the weights again from the lse.

Formulas are in `csd/kernels/attention/packed/`, the lists of tiles and blocks in `forward.py`.

    dq_kernel     one program per tile of rows: dq is a sum over its blocks of keys
    dkv_kernel    one program per block of keys and part of its tiles: dk and dv are sums over them

Both add in the order of their list, and the parts of a block, which keep the device busy where a
prompt's few blocks have all rows as readers, are added in order too: no atomics, and two runs have
equal bits.
"""

import torch
import triton
import triton.language as tl

from csd.kernels.attention.packed.layout import PackedLayout
from csd.kernels.attention.packed.reference import grad_of_sinks
from csd.kernels.attention.packed.triton.forward import (
    check_call,
    constants,
    packed_attention_triton,
    plan_packed,
    scales,
    tile_sizes,
)
from csd.kernels.attention.packed.triton.tile import (
    PackedOperands,
    packed_block_keys,
    packed_tile_rows,
    sees_keys,
    tile_gradients,
)
from csd.kernels.attention.triton.launch import DTYPES
from csd.kernels.attention.triton.tile import store_heads, tile_scores
from csd.kernels.common.gpu import KIB, chip_of, programs_of

# most parts of the tiles of a block: each has gradients of all keys in memory
PARTS = 8


@triton.jit
def _weights(score, lse, seen, scale, cap, CAP: tl.constexpr):
    """The weights of a tile, 0 where a row does not see a key, and the derivatives of the cap.

    score: of `tile_scores`. lse: in base 2. seen: of `sees_keys`.
    """
    if CAP:
        weight = tl.exp2(score - lse)
        tanh = score / cap
        slope = 1.0 - tanh * tanh
    else:
        weight = tl.exp2(tl.fma(score, scale, -lse))
        slope = 1.0
    return tl.where(seen, weight, 0.0), slope


@triton.jit
def dq_kernel(
    operands,
    layout,
    work,
    dq_ptr,  # [R, H, D]
    R,
    B,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    factor,  # of q . k
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    PRECISION: tl.constexpr = C.PRECISION
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    rows = packed_tile_rows(operands, work, tile, kv, R, ROWS, DTYPE, C)
    grad, lse, delta = tile_gradients(operands, rows, DTYPE, C)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(0, tl.load(work.visit_count + tile)):
        block = tl.load(work.visits + tile * B + i)
        keys = packed_block_keys(operands, layout, work, block, kv, R, DTYPE, C)
        # [BLOCK_M, BLOCK_N]
        score = tile_scores(rows.q, keys.k, scale, cap, C)
        seen = sees_keys(work, rows, keys, 1)
        weight, slope = _weights(score, lse[:, None], seen, scale, cap, C.CAP)
        dweight = tl.dot(grad, tl.trans(keys.v), input_precision=PRECISION)
        dscore = weight * (dweight - delta[:, None]) * slope
        dq = tl.dot(dscore.to(DTYPE), keys.k, dq, input_precision=PRECISION)
    store_heads(dq_ptr, dq * factor, rows.index * C.D, rows.mask, C.D, BLOCK_D)


@triton.jit
def dkv_kernel(
    operands,
    layout,
    work,
    dk_ptr,  # [parts, R, K, D]
    dv_ptr,  # [parts, R, K, DV]
    R,
    T,
    parts,
    scale,  # times log2 e; with a cap, divided by it instead
    cap,  # times log2 e
    factor,  # of q . k
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
    C: tl.constexpr,
):
    K: tl.constexpr = C.K
    D: tl.constexpr = C.D
    DV: tl.constexpr = C.DV
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_V: tl.constexpr = C.BLOCK_V
    PRECISION: tl.constexpr = C.PRECISION
    block = tl.program_id(0)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    keys = packed_block_keys(operands, layout, work, block, kv, R, DTYPE, C)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    count = tl.load(work.reader_count + block)
    each_part = tl.cdiv(count, parts)
    for i in range(part * each_part, tl.minimum((part + 1) * each_part, count)):
        tile = tl.load(work.readers + block * T + i)
        rows = packed_tile_rows(operands, work, tile, kv, R, ROWS, DTYPE, C)
        grad, lse, delta = tile_gradients(operands, rows, DTYPE, C)
        # [BLOCK_N, BLOCK_M]
        score = tile_scores(keys.k, rows.q, scale, cap, C)
        seen = sees_keys(work, rows, keys, 0) & rows.mask[None, :]
        weight, slope = _weights(score, lse[None, :], seen, scale, cap, C.CAP)
        dv = tl.dot(weight.to(DTYPE), grad, dv, input_precision=PRECISION)
        dweight = tl.dot(keys.v, tl.trans(grad), input_precision=PRECISION)
        dscore = weight * (dweight - delta[None, :]) * slope
        dk = tl.dot(dscore.to(DTYPE), rows.q, dk, input_precision=PRECISION)
    dk_ptr += part.to(tl.int64) * R * (K * D)
    dv_ptr += part.to(tl.int64) * R * (K * DV)
    store_heads(dk_ptr, dk * factor, keys.index * D, keys.mask, D, BLOCK_D)
    store_heads(dv_ptr, dv, keys.index * DV, keys.mask, DV, BLOCK_V)


def packed_attention_backward_triton(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    end: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq, dk, dv and dsinks, as `packed_attention_backward_ref`.

    Two launches, and PyTorch's of delta, of the plan and of the sums over parts.
    """
    (R, H, D), (K, DV) = q.shape, v.shape[1:]
    check_call(q, H // K, scale)
    if lse is None:
        properties = window, chunk, softcap, sinks
        lse = packed_attention_triton(q, k, v[..., :0], end, position, scale, *properties)[1]
    grad, q, k, v, lse = (x.contiguous() for x in (grad, q, k, v, lse))
    delta = (grad.float() * out).sum(-1)
    dsinks = grad_of_sinks(sinks, lse, delta, q)
    if R == 0:
        return q.clone(), k.clone(), v.clone(), dsinks
    chip, dtype, size = chip_of(q.device), DTYPES[q.dtype], max(D, DV)
    tiles = tile_sizes(chip, dtype, size, H // K)
    if size > 128 and chip.shared < 128 * KIB:
        # rows and their gradients leave no room for keys and values
        tiles["BLOCK_M"] = max(32, triton.next_power_of_2(H // K))
    operands = PackedOperands(q, k, v, grad, lse, delta)
    of_kernels = constants(dq_kernel, operands, softcap, tiles)
    work = plan_packed(end, position, of_kernels["ROWS"], tiles["BLOCK_N"], window, chunk)
    common = dict(
        operands=operands,
        layout=PackedLayout(end, position),
        work=work,
        R=R,
        factor=scale,
        **scales(scale, softcap),
        **of_kernels,
    )
    dq = torch.empty_like(q)
    dq_kernel[(work.visits.shape[0], K)](dq_ptr=dq, B=work.visits.shape[1], **common)
    blocks = work.readers.shape[0]
    parts = max(1, min(PARTS, 2 * programs_of(q.device) // (blocks * K)))
    dk, dv = (torch.empty(parts, *x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    # two sums of a block of keys stay in registers
    wide = {} if chip.is_amd else {"num_warps": 8}
    dkv_kernel[(blocks, K, parts)](
        dk_ptr=dk, dv_ptr=dv, T=work.readers.shape[1], parts=parts, **common | wide
    )
    return dq, dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype), dsinks
