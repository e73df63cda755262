"""Advance the slots' recurrent states by chunks of exactly 16 tokens.

    S <- d_t S + k_t u_t^T    for the tokens t = base .. base + 15 of a slot's tail, in this order

repeated while base < target, with base 16 larger each time. A state is stored only at positions
that are multiples of 16, so its bits are a function of the text and do not depend on where steps
begin and end. (The recurrence of Yang et al., "Gated Delta Networks", 2024, and of Dao and Gu,
"Transformers are SSMs", 2024, with given updates u_t.)
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from csd.kernels.common.checks import check_tensor
from csd.kernels.common.operator import operator
from csd.state.recurrent import CHUNK, TAIL

# most chunks that one call can add: a step commits 17 tokens at most
MOST = TAIL // CHUNK


def next_state(
    state: torch.Tensor,  # [L, S, H, Dk, Dv]
    key: torch.Tensor,  # [L, S, TAIL, Hk, Dk]
    update: torch.Tensor,  # [L, S, TAIL, H, Dv]
    decay: torch.Tensor,  # [L, S, TAIL, H]
    base: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns the states [L, S, H, Dk, Dv] after the CHUNK tokens that follow `base`."""
    each, s = state.shape[2] // key.shape[3], torch.arange(base.shape[0], device=base.device)
    for t in range(CHUNK):
        place = (base.long() + t) % TAIL
        k = key[:, s, place].repeat_interleave(each, 2)[..., None]
        u, d = update[:, s, place][..., None, :], decay[:, s, place][..., None, None]
        state = d * state + k * u
    return state


def advance_state_ref(
    state: torch.Tensor,  # [L, S, H, Dk, Dv], written in place
    key: torch.Tensor,  # [L, S, TAIL, Hk, Dk]
    update: torch.Tensor,  # [L, S, TAIL, H, Dv]
    decay: torch.Tensor,  # [L, S, TAIL, H]
    base: torch.Tensor,  # [S] int32, multiples of 16
    target: torch.Tensor,  # [S] int32, multiples of 16, at most base + 32
) -> None:
    """Plain PyTorch. `base` is not changed: the caller advances it."""
    for i in range(MOST):
        at = base + CHUNK * i
        moved = next_state(state, key, update, decay, at)
        # unwritten tokens of a tail may hold any value: select, since 0 * NaN is not 0
        state.copy_(torch.where((at < target)[:, None, None, None], moved, state))


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
        place = (base + t) % TAIL
        # [BLOCK_K]
        k = tl.load(key_ptr + place * (Hk * Dk) + offs_k, mask=offs_k < Dk, other=0.0)
        # [BLOCK_V]
        u = tl.load(update_ptr + place * (H * Dv) + offs_v, mask=offs_v < Dv, other=0.0)
        k, u = tl.broadcast_to(k[:, None], S.shape), tl.broadcast_to(u[None, :], S.shape)
        S = tl.fma(k, u, tl.load(decay_ptr + place * H) * S)
    return S


@triton.jit
def _advance_state_kernel(
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
    at = (slot % S).to(tl.int32)
    base, target = tl.load(base_ptr + at), tl.load(target_ptr + at)
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


def advance_state_triton(
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """One launch. A program of a slot that does not advance reads only base and target."""
    L, S, H, Dk, Dv = state.shape
    tiles = state_tiles(Dk, Dv)
    _advance_state_kernel[(L * S, H, triton.cdiv(Dv, tiles["BLOCK_V"]))](
        state_ptr=state,
        key_ptr=key,
        update_ptr=update,
        decay_ptr=decay,
        base_ptr=base,
        target_ptr=target,
        S=S,
        H=H,
        Hk=key.shape[3],
        Dk=Dk,
        Dv=Dv,
        TAIL=TAIL,
        CHUNK=CHUNK,
        **tiles,
        num_warps=4,
    )


def state_tiles(Dk: int, Dv: int) -> dict[str, int]:
    """Tile sizes of a state: all Dk rows, and as many of the Dv columns as fit the registers."""
    return dict(
        BLOCK_K=max(16, triton.next_power_of_2(Dk)),
        BLOCK_V=max(16, min(32, triton.next_power_of_2(Dv))),
    )


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu import advance

    return (lambda *args: advance.reads_states(*args[:4])), advance.advance_state


_advance_state = operator(
    "advance_state", advance_state_ref, advance_state_triton, loop=_loop, written=("state",)
)


def advance_state(
    state: torch.Tensor,  # [L, S, H, Dk, Dv], float32 or float64, written in place
    key: torch.Tensor,  # [L, S, 32, Hk, Dk], indexed by position % 32
    update: torch.Tensor,  # [L, S, 32, H, Dv]
    decay: torch.Tensor,  # [L, S, 32, H]
    base: torch.Tensor,  # [S] int32, multiples of 16
    target: torch.Tensor,  # [S] int32, multiples of 16, at most base + 32
) -> None:
    """Adds the tokens base .. target - 1 of each slot's tail to its state, in all L layers."""
    check_states(state, key, update, decay, layers=True)
    for name, x in (("base", base), ("target", target)):
        check_tensor(name, x, state.shape[1:2], torch.int32, state.device)
    _advance_state(state, key, update, decay, base, target)


def check_states(
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    layers: bool = False,
) -> None:
    """Raises ValueError, naming the tensor, unless states and tails fit each other.

    layers: True if the tensors have a first dimension L.
    """
    if state.dim() != 4 + layers or state.dtype not in (torch.float32, torch.float64):
        sizes = "[L, S, H, Dk, Dv]" if layers else "[S, H, Dk, Dv]"
        raise ValueError(
            f"state must be float32 or float64 of shape {sizes}, got {state.dtype} of "
            f"{tuple(state.shape)}"
        )
    *first, H, Dk, Dv = state.shape
    for name, x, shape in (
        ("state", state, state.shape),
        ("key", key, (*first, TAIL, None, Dk)),
        ("update", update, (*first, TAIL, H, Dv)),
        ("decay", decay, (*first, TAIL, H)),
    ):
        check_tensor(name, x, shape, state.dtype, state.device)
    if not key.shape[-2] or H % key.shape[-2]:
        raise ValueError(f"key must have a number of heads that divides {H}, got {key.shape[-2]}")
