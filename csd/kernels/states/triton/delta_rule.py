"""The Triton kernel of `tree_delta_rule` and `tree_ssm`, and its launches: one each.

A program computes one head of a slot and a block of its value's columns, so each state is read
once. It processes the slot's rows 16 at a time, parents first, and within a block by depth.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.states.paths import DEPTHS
from csd.kernels.states.triton.advance import add_chunk, state_tiles
from csd.state.recurrent import CHUNK, TAIL


@triton.jit
def _add_token(x, decay, rows, key, update):
    """decay x + (key . rows) update.

    An explicit fma rounds the second product and the sum once, for tokens of tails and for nodes;
    the compiler does not guarantee that.
    """
    weight = tl.sum(rows * key, 1)[:, None]
    return tl.fma(tl.broadcast_to(weight, x.shape), tl.broadcast_to(update, x.shape), decay * x)


class NodeValues(NamedTuple):
    """Values that a step computes for the rows of its pool."""

    q: torch.Tensor  # [M, Hk, Dk]
    value: torch.Tensor | None  # [M, H, Dv]
    strength: torch.Tensor | None  # [M, H]
    key: torch.Tensor  # [M, Hk, Dk]
    decay: torch.Tensor  # [M, H]
    update: torch.Tensor  # [M, H, Dv], written where SOLVE


class LayerStates(NamedTuple):
    """The slots' states and tails of one layer."""

    state: torch.Tensor  # [S, H, Dk, Dv]
    key: torch.Tensor  # [S, TAIL, Hk, Dk]
    update: torch.Tensor  # [S, TAIL, H, Dv]
    decay: torch.Tensor  # [S, TAIL, H]
    base: torch.Tensor  # [S] int32


class RowPlaces(NamedTuple):
    """Places of the rows of a pool."""

    slot: torch.Tensor  # [M] int32
    position: torch.Tensor  # [M] int32
    path: torch.Tensor  # [M, DEPTHS] int32
    slot_start: torch.Tensor  # [S] int32
    slot_nodes: torch.Tensor  # [S] int32


class StateConstants(NamedTuple):
    """Constants of `tree_state_kernel`."""

    H: int
    Hk: int
    Dk: int
    Dv: int
    SOLVE: bool
    BLOCK_K: int
    BLOCK_V: int
    BLOCK_M: int
    BLOCK_D: int
    TILE_K: int
    DEPTHS: int
    TAIL: int
    CHUNK: int


@triton.jit
def _read_state(
    state,  # [Dk, Dv] of a head
    nodes,
    offsets,  # [BLOCK_M], of rows in keys and queries
    live,  # [BLOCK_M]
    tail,  # key, update, decay and base, as `add_chunk` takes them
    offs_v,  # [BLOCK_V]
    LATER: tl.constexpr,
    C: tl.constexpr,
):
    """Products of keys and queries with a state, or with the state one chunk later if LATER."""
    key, update, decay, base = tail
    H: tl.constexpr = C.H
    Hk: tl.constexpr = C.Hk
    Dk: tl.constexpr = C.Dk
    Dv: tl.constexpr = C.Dv
    TILE_K: tl.constexpr = C.TILE_K
    BLOCK_M: tl.constexpr = live.shape[0]
    BLOCK_V: tl.constexpr = offs_v.shape[0]
    a = tl.zeros([BLOCK_M, BLOCK_V], state.dtype.element_ty)
    o = tl.zeros([BLOCK_M, BLOCK_V], state.dtype.element_ty)
    for first in range(0, Dk, TILE_K):
        offs_k = first + tl.arange(0, TILE_K)
        # [TILE_K, BLOCK_V]
        mask = (offs_k[:, None] < Dk) & (offs_v[None, :] < Dv)
        S = tl.load(state + offs_k[:, None] * Dv + offs_v[None, :], mask=mask, other=0.0)
        if LATER:
            S = add_chunk(
                S, key, update, decay, base, offs_k, offs_v, Hk, H, Dk, Dv, C.TAIL, C.CHUNK
            )
        # [BLOCK_M, TILE_K]
        at_k, mask_k = offsets[:, None] + offs_k[None, :], live[:, None] & (offs_k[None, :] < Dk)
        q = tl.load(nodes.q + at_k, mask=mask_k, other=0.0)
        o = tl.dot(q, S, o, input_precision="ieee", out_dtype=S.dtype)
        if C.SOLVE:
            k = tl.load(nodes.key + at_k, mask=mask_k, other=0.0)
            a = tl.dot(k, S, a, input_precision="ieee", out_dtype=S.dtype)
    return a, o


@triton.jit
def _zero_padding(slot_ptr, out_ptr, update_ptr, M, head, offs_v, C: tl.constexpr):
    BLOCK_M: tl.constexpr = C.BLOCK_M
    for first in range(0, M, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        padding = tl.load(slot_ptr + row, mask=row < M, other=0) < 0
        offsets = (row.to(tl.int64) * C.H + head)[:, None] * C.Dv + offs_v[None, :]
        mask = padding[:, None] & (offs_v[None, :] < C.Dv)
        zero = tl.zeros(offsets.shape, out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, zero, mask=mask)
        if C.SOLVE:
            tl.store(update_ptr + offsets, zero, mask=mask)


@triton.jit(do_not_specialize=["M"])
def tree_state_kernel(
    nodes,
    states,
    rows,
    out_ptr,  # [M, H, Dv]
    M,
    C: tl.constexpr,
):
    H: tl.constexpr = C.H
    Hk: tl.constexpr = C.Hk
    Dk: tl.constexpr = C.Dk
    Dv: tl.constexpr = C.Dv
    DEPTHS: tl.constexpr = C.DEPTHS
    TAIL: tl.constexpr = C.TAIL
    CHUNK: tl.constexpr = C.CHUNK
    SOLVE: tl.constexpr = C.SOLVE
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_K: tl.constexpr = C.BLOCK_K
    BLOCK_V: tl.constexpr = C.BLOCK_V
    BLOCK_D: tl.constexpr = C.BLOCK_D
    # the last program of a head writes the padding
    s, head = tl.num_programs(0) - 1, tl.program_id(1)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if tl.program_id(0) == s:
        _zero_padding(rows.slot, out_ptr, nodes.update, M, head, offs_v, C)
    else:
        s = tl.program_id(0)
        count, start = tl.load(rows.slot_nodes + s), tl.load(rows.slot_start + s)
        if count > 0:
            base = tl.load(states.base + s)
            committed = tl.load(rows.position + start)
            head_k, wide_s = head // (H // Hk), s.to(tl.int64)
            offs_k, offs_d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
            mask_k, mask_v = offs_k < Dk, offs_v < Dv
            key = states.key + (wide_s * TAIL * Hk + head_k) * Dk
            update = states.update + (wide_s * TAIL * H + head) * Dv
            decay = states.decay + wide_s * TAIL * H + head
            state = states.state + (wide_s * H + head) * (Dk * Dv)
            tail = (key, update, decay, base)
            for block in range(0, count, BLOCK_M):
                # [BLOCK_M]
                m = block + tl.arange(0, BLOCK_M)
                live = m < count
                row = (start + m).to(tl.int64)
                first = tl.load(rows.position + row, mask=live, other=0)
                first = tl.maximum(first - DEPTHS, 0) // CHUNK * CHUNK
                first = tl.maximum(first, base)
                # [BLOCK_M, BLOCK_D]
                above = tl.load(
                    rows.path + row[:, None] * DEPTHS + offs_d[None, :],
                    mask=live[:, None] & (offs_d[None, :] < DEPTHS),
                    other=-1,
                )
                depth = tl.sum((above >= 0).to(tl.int32), 1) - 1
                # [BLOCK_M, BLOCK_K]
                row_offsets = (row * Hk + head_k) * Dk
                # [BLOCK_M, BLOCK_V]
                a, o = _read_state(state, nodes, row_offsets, live, tail, offs_v, False, C)
                if tl.max(tl.where(live, first, 0)) > base:
                    a_later, o_later = _read_state(
                        state, nodes, row_offsets, live, tail, offs_v, True, C
                    )
                    a = tl.where((first > base)[:, None], a_later, a)
                    o = tl.where((first > base)[:, None], o_later, o)
                at_k, both = row_offsets[:, None] + offs_k[None, :], live[:, None] & mask_k[None, :]
                k = tl.load(nodes.key + at_k, mask=both, other=0.0)
                q = tl.load(nodes.q + at_k, mask=both, other=0.0)
                for p in range(base, committed):
                    index = p % TAIL
                    k_p = tl.load(key + index * (Hk * Dk) + offs_k, mask=mask_k, other=0.0)
                    u_p = tl.load(update + index * (H * Dv) + offs_v, mask=mask_v, other=0.0)
                    d_p = tl.load(decay + index * H)
                    seen = (first <= p)[:, None]
                    if SOLVE:
                        a = tl.where(seen, _add_token(a, d_p, k, k_p[None, :], u_p[None, :]), a)
                    o = tl.where(seen, _add_token(o, d_p, q, k_p[None, :], u_p[None, :]), o)
                # [BLOCK_M, BLOCK_V]
                at_v = (row * H + head)[:, None] * Dv + offs_v[None, :]
                both_v = live[:, None] & mask_v[None, :]
                for d in range(tl.max(depth) + 1):
                    if SOLVE:
                        # [BLOCK_M, 1]
                        strength = tl.load(nodes.strength + row * H + head, mask=live, other=0.0)
                        own = tl.load(nodes.decay + row * H + head, mask=live, other=0.0)
                        value = tl.load(nodes.value + at_v, mask=both_v, other=0.0)
                        u = strength[:, None] * (value - own[:, None] * a)
                        tl.store(nodes.update + at_v, u, mask=both_v & (depth == d)[:, None])
                        # rows below read what other threads have stored
                        tl.debug_barrier()
                    # [BLOCK_M], the row of depth d above each
                    up = tl.sum(tl.where(offs_d[None, :] == d, above, 0), 1)
                    there = live & (up >= 0)
                    up = tl.maximum(up, 0).to(tl.int64)
                    k_d = tl.load(
                        nodes.key + (up * Hk + head_k)[:, None] * Dk + offs_k[None, :],
                        mask=there[:, None] & mask_k[None, :],
                        other=0.0,
                    )
                    u_d = tl.load(
                        nodes.update + (up * H + head)[:, None] * Dv + offs_v[None, :],
                        mask=there[:, None] & mask_v[None, :],
                        other=0.0,
                    )
                    d_d = tl.load(nodes.decay + up * H + head, mask=there, other=0.0)[:, None]
                    if SOLVE:
                        a = tl.where(there[:, None], _add_token(a, d_d, k, k_d, u_d), a)
                    o = tl.where(there[:, None], _add_token(o, d_d, q, k_d, u_d), o)
                tl.store(out_ptr + at_v, o, mask=both_v)


# rows, and keys of a state, that a program multiplies at once: float32 products have no tensor
# cores, and their sums are all in registers
BLOCK_M, TILE_K = 16, 16


def tree_delta_rule_triton(
    q: torch.Tensor,
    value: torch.Tensor,
    strength: torch.Tensor,
    *nodes_and_states: torch.Tensor,
) -> torch.Tensor:
    """Returns outputs [M, H, Dv]; arguments as in `tree_delta_rule`."""
    return _launch(q, value, strength, *nodes_and_states)


def tree_ssm_triton(q: torch.Tensor, *nodes_and_states: torch.Tensor) -> torch.Tensor:
    """Returns outputs [M, H, Dv]; arguments as in `tree_ssm`."""
    return _launch(q, None, None, *nodes_and_states)


def _launch(
    q: torch.Tensor,
    value: torch.Tensor | None,
    strength: torch.Tensor | None,
    *nodes_and_states: torch.Tensor,
) -> torch.Tensor:
    nodes, states = nodes_and_states[:3], LayerStates(*nodes_and_states[3:8])
    rows, (_, H, Dk, Dv) = RowPlaces(*nodes_and_states[8:]), states.state.shape
    out = torch.empty_like(nodes[2])
    tiles = state_tiles(Dk, Dv)
    constants = StateConstants(
        H=H,
        Hk=states.key.shape[2],
        Dk=Dk,
        Dv=Dv,
        SOLVE=value is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_D=triton.next_power_of_2(DEPTHS),
        TILE_K=TILE_K,
        DEPTHS=DEPTHS,
        TAIL=TAIL,
        CHUNK=CHUNK,
        **tiles,
    )
    tree_state_kernel[(states.base.shape[0] + 1, H, triton.cdiv(Dv, tiles["BLOCK_V"]))](
        nodes=NodeValues(q, value, strength, *nodes),
        states=states,
        rows=rows,
        out_ptr=out,
        M=out.shape[0],
        C=constants,
        num_warps=4,
    )
    return out
