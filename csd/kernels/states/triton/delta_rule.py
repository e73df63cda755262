"""The Triton kernel of `tree_delta_rule` and `tree_ssm`, and its launches: one each.

A program computes one head of a slot and a block of its value's columns, so each state is read
once. It processes the slot's rows 16 at a time, parents first, and within a block by depth.
"""

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


@triton.jit
def _read_state(
    state,  # [Dk, Dv] of a head
    rows,  # keys and queries [M, Hk, Dk], offsets of rows in both [BLOCK_M], live [BLOCK_M]
    tail,  # key, update, decay and base, as `add_chunk` takes them
    offs_v,  # [BLOCK_V]
    H: tl.constexpr,
    Hk: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    LATER: tl.constexpr,
    SOLVE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Products of keys and queries with a state, or with the state one chunk later if LATER."""
    k_ptr, q_ptr, offsets, live = rows
    key, update, decay, base = tail
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
            S = add_chunk(S, key, update, decay, base, offs_k, offs_v, Hk, H, Dk, Dv, TAIL, CHUNK)
        # [BLOCK_M, TILE_K]
        at_k, mask_k = offsets[:, None] + offs_k[None, :], live[:, None] & (offs_k[None, :] < Dk)
        q = tl.load(q_ptr + at_k, mask=mask_k, other=0.0)
        o = tl.dot(q, S, o, input_precision="ieee", out_dtype=S.dtype)
        if SOLVE:
            k = tl.load(k_ptr + at_k, mask=mask_k, other=0.0)
            a = tl.dot(k, S, a, input_precision="ieee", out_dtype=S.dtype)
    return a, o


@triton.jit
def _zero_padding(
    slot_ptr,
    out_ptr,
    update_ptr,
    M,
    head,
    offs_v,
    H: tl.constexpr,
    Dv: tl.constexpr,
    SOLVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    for first in range(0, M, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        padding = tl.load(slot_ptr + row, mask=row < M, other=0) < 0
        offsets = (row.to(tl.int64) * H + head)[:, None] * Dv + offs_v[None, :]
        mask = padding[:, None] & (offs_v[None, :] < Dv)
        zero = tl.zeros(offsets.shape, out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, zero, mask=mask)
        if SOLVE:
            tl.store(update_ptr + offsets, zero, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _tree_state_kernel(
    q_ptr,  # [M, Hk, Dk]
    value_ptr,  # [M, H, Dv], or None
    strength_ptr,  # [M, H], or None
    node_key_ptr,  # [M, Hk, Dk]
    node_decay_ptr,  # [M, H]
    node_update_ptr,  # [M, H, Dv], written where SOLVE
    state_ptr,  # [S, H, Dk, Dv]
    key_ptr,  # [S, TAIL, Hk, Dk]
    update_ptr,  # [S, TAIL, H, Dv]
    decay_ptr,  # [S, TAIL, H]
    base_ptr,  # [S] int32
    slot_ptr,  # [M] int32
    position_ptr,  # [M] int32
    path_ptr,  # [M, DEPTHS] int32
    slot_start_ptr,  # [S] int32
    slot_nodes_ptr,  # [S] int32
    out_ptr,  # [M, H, Dv]
    M,
    H: tl.constexpr,
    Hk: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    DEPTHS: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    SOLVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # the last program of a head writes the padding
    s, head = tl.num_programs(0) - 1, tl.program_id(1)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if tl.program_id(0) == s:
        _zero_padding(slot_ptr, out_ptr, node_update_ptr, M, head, offs_v, H, Dv, SOLVE, BLOCK_M)
    else:
        s = tl.program_id(0)
        nodes, start = tl.load(slot_nodes_ptr + s), tl.load(slot_start_ptr + s)
        if nodes > 0:
            base = tl.load(base_ptr + s)
            committed = tl.load(position_ptr + start)
            head_k, wide_s = head // (H // Hk), s.to(tl.int64)
            offs_k, offs_d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
            mask_k, mask_v = offs_k < Dk, offs_v < Dv
            key = key_ptr + (wide_s * TAIL * Hk + head_k) * Dk
            update = update_ptr + (wide_s * TAIL * H + head) * Dv
            decay = decay_ptr + wide_s * TAIL * H + head
            state = state_ptr + (wide_s * H + head) * (Dk * Dv)
            tail = (key, update, decay, base)
            for block in range(0, nodes, BLOCK_M):
                # [BLOCK_M]
                m = block + tl.arange(0, BLOCK_M)
                live = m < nodes
                row = (start + m).to(tl.int64)
                first = tl.load(position_ptr + row, mask=live, other=0)
                first = tl.maximum(first - DEPTHS, 0) // CHUNK * CHUNK
                first = tl.maximum(first, base)
                # [BLOCK_M, BLOCK_D]
                above = tl.load(
                    path_ptr + row[:, None] * DEPTHS + offs_d[None, :],
                    mask=live[:, None] & (offs_d[None, :] < DEPTHS),
                    other=-1,
                )
                depth = tl.sum((above >= 0).to(tl.int32), 1) - 1
                # [BLOCK_M, BLOCK_K]
                row_offsets = (row * Hk + head_k) * Dk
                # [BLOCK_M, BLOCK_V]
                rows = (node_key_ptr, q_ptr, row_offsets, live)
                a, o = _read_state(
                    state, rows, tail, offs_v, H, Hk, Dk, Dv, TAIL, CHUNK, False, SOLVE, TILE_K
                )
                if tl.max(tl.where(live, first, 0)) > base:
                    a_later, o_later = _read_state(
                        state, rows, tail, offs_v, H, Hk, Dk, Dv, TAIL, CHUNK, True, SOLVE, TILE_K
                    )
                    a = tl.where((first > base)[:, None], a_later, a)
                    o = tl.where((first > base)[:, None], o_later, o)
                at_k, both = row_offsets[:, None] + offs_k[None, :], live[:, None] & mask_k[None, :]
                k = tl.load(node_key_ptr + at_k, mask=both, other=0.0)
                q = tl.load(q_ptr + at_k, mask=both, other=0.0)
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
                        strength = tl.load(strength_ptr + row * H + head, mask=live, other=0.0)
                        own = tl.load(node_decay_ptr + row * H + head, mask=live, other=0.0)
                        value = tl.load(value_ptr + at_v, mask=both_v, other=0.0)
                        u = strength[:, None] * (value - own[:, None] * a)
                        tl.store(node_update_ptr + at_v, u, mask=both_v & (depth == d)[:, None])
                        # rows below read what other threads have stored
                        tl.debug_barrier()
                    # [BLOCK_M], the row of depth d above each
                    up = tl.sum(tl.where(offs_d[None, :] == d, above, 0), 1)
                    there = live & (up >= 0)
                    up = tl.maximum(up, 0).to(tl.int64)
                    k_d = tl.load(
                        node_key_ptr + (up * Hk + head_k)[:, None] * Dk + offs_k[None, :],
                        mask=there[:, None] & mask_k[None, :],
                        other=0.0,
                    )
                    u_d = tl.load(
                        node_update_ptr + (up * H + head)[:, None] * Dv + offs_v[None, :],
                        mask=there[:, None] & mask_v[None, :],
                        other=0.0,
                    )
                    d_d = tl.load(node_decay_ptr + up * H + head, mask=there, other=0.0)[:, None]
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
    node_key: torch.Tensor,
    node_decay: torch.Tensor,
    node_update: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
) -> torch.Tensor:
    S, H, Dk, Dv = state.shape
    out = torch.empty_like(node_update)
    tiles = state_tiles(Dk, Dv)
    _tree_state_kernel[(S + 1, H, triton.cdiv(Dv, tiles["BLOCK_V"]))](
        q_ptr=q,
        value_ptr=value,
        strength_ptr=strength,
        node_key_ptr=node_key,
        node_decay_ptr=node_decay,
        node_update_ptr=node_update,
        state_ptr=state,
        key_ptr=key,
        update_ptr=update,
        decay_ptr=decay,
        base_ptr=base,
        slot_ptr=slot,
        position_ptr=position,
        path_ptr=path,
        slot_start_ptr=slot_start,
        slot_nodes_ptr=slot_nodes,
        out_ptr=out,
        M=slot.shape[0],
        H=H,
        Hk=key.shape[2],
        Dk=Dk,
        Dv=Dv,
        DEPTHS=DEPTHS,
        TAIL=TAIL,
        CHUNK=CHUNK,
        SOLVE=value is not None,
        BLOCK_M=BLOCK_M,
        **tiles,
        BLOCK_D=triton.next_power_of_2(DEPTHS),
        TILE_K=TILE_K,
        num_warps=4,
    )
    return out
