"""Advance the slots' recurrent states by chunks of exactly 16 tokens.

    S <- d_t S + k_t u_t^T    for the tokens t = base .. base + 15 of a slot's tail, in this order

repeated while base < target, with base 16 larger each time. A state is stored only at positions
that are multiples of 16, so its bits are a function of the text and do not depend on where steps
begin and end. (The recurrence of Yang et al., "Gated Delta Networks", 2024, and of Dao and Gu,
"Transformers are SSMs", 2024, with given updates u_t.)
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import operator
from csd.state.record import check_tensor
from csd.state.recurrent import CHUNK, TAIL

# most chunks that one call can add: a step commits 17 tokens at most
MAX_CHUNKS = TAIL // CHUNK


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
        index = (base.long() + t) % TAIL
        k = key[:, s, index].repeat_interleave(each, 2)[..., None]
        u, d = update[:, s, index][..., None, :], decay[:, s, index][..., None, None]
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
    for i in range(MAX_CHUNKS):
        begin = base + CHUNK * i
        moved = next_state(state, key, update, decay, begin)
        # unwritten tokens of a tail may hold any value: select, since 0 * NaN is not 0
        state.copy_(torch.where((begin < target)[:, None, None, None], moved, state))


def advance_state_triton(
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """One launch. A program of a slot that does not advance reads only base and target."""

    import triton

    from csd.kernels.states.triton.advance import advance_state_kernel, state_tiles

    L, S, H, Dk, Dv = state.shape
    tiles = state_tiles(Dk, Dv)
    advance_state_kernel[(L * S, H, triton.cdiv(Dv, tiles["BLOCK_V"]))](
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
    *,
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
