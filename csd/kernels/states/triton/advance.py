"""The kernel of `advance_state`."""

import triton
import triton.language as tl


def state_tiles(Dk: int, Dv: int) -> dict[str, int]:
    """Tile sizes of a state: all Dk rows, and as many of the Dv columns as fit the registers."""
    return dict(
        BLOCK_K=max(16, triton.next_power_of_2(Dk)),
        BLOCK_V=max(16, min(32, triton.next_power_of_2(Dv))),
    )


@triton.jit
def add_chunk(
    S,  # [BLOCK_K, BLOCK_V]
    key_ptr,  # [TAIL, Hk, Dk] of a slot, from the program's key head on
    update_ptr,  # [TAIL, H, Dv] of a slot, from the program's head on
    decay_ptr,  # [TAIL, H] of a slot, from the program's head on
    base,
    offs_k,
    offs_v,
    Hk: tl.constexpr,
    H: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns the state S after one more chunk. The fma is explicit: all callers get equal bits."""
    for t in range(CHUNK):
        index = (base + t) % TAIL
        # [BLOCK_K]
        k = tl.load(key_ptr + index * (Hk * Dk) + offs_k, mask=offs_k < Dk, other=0.0)
        # [BLOCK_V]
        u = tl.load(update_ptr + index * (H * Dv) + offs_v, mask=offs_v < Dv, other=0.0)
        k, u = tl.broadcast_to(k[:, None], S.shape), tl.broadcast_to(u[None, :], S.shape)
        S = tl.fma(k, u, tl.load(decay_ptr + index * H) * S)
    return S


@triton.jit
def advance_state_kernel(
    state_ptr,  # [L, S, H, Dk, Dv]
    key_ptr,  # [L, S, TAIL, Hk, Dk]
    update_ptr,  # [L, S, TAIL, H, Dv]
    decay_ptr,  # [L, S, TAIL, H]
    base_ptr,  # [S] int32
    target_ptr,  # [S] int32
    S,
    H: tl.constexpr,
    Hk: tl.constexpr,
    Dk: tl.constexpr,
    Dv: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    slot, head = tl.program_id(0), tl.program_id(1)
    index = (slot % S).to(tl.int32)
    base, target = tl.load(base_ptr + index), tl.load(target_ptr + index)
    if base < target:
        # index of (layer, slot)
        row = slot.to(tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = (offs_k[:, None] < Dk) & (offs_v[None, :] < Dv)
        where = state_ptr + (row * H + head) * (Dk * Dv) + offs_k[:, None] * Dv + offs_v[None, :]
        key = key_ptr + (row * TAIL * Hk + head // (H // Hk)) * Dk
        update = update_ptr + (row * TAIL * H + head) * Dv
        decay = decay_ptr + row * TAIL * H + head
        # [BLOCK_K, BLOCK_V]
        x = tl.load(where, mask=mask, other=0.0)
        while base < target:
            x = add_chunk(x, key, update, decay, base, offs_k, offs_v, Hk, H, Dk, Dv, TAIL, CHUNK)
            base += CHUNK
        tl.store(where, x, mask=mask)
