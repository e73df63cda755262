"""`csd.kernels.advance_state` as a loop, and one chunk of it for the loops that read states."""

import torch
from numba import prange

from csd.cpu.compiled import loop
from csd.cpu.numbers import LIKE, PLAIN, memory, require
from csd.cpu.threads import by_threads
from csd.state.recurrent import CHUNK, TAIL


@loop
def add_chunk(state, moved, stride, first, key, update, decay):
    """moved[i, :Dv] = the state one chunk on, of the tail's tokens from place `first` on.

    state: [Dk, Dv]; moved: of as many rows, `stride` numbers apart, or `state` itself;
    key: [TAIL, Hk, Dk] at a head, update [TAIL, H, Dv] and decay [TAIL, H] likewise.
    """
    Dk, Dv = state.shape
    for i in range(Dk):
        row = moved[i * stride : i * stride + Dv]
        row[:] = state[i]
        for t in range(first, first + CHUNK):
            k, d, u = key[t, i], decay[t], update[t]
            for j in range(Dv):
                row[j] = d * row[j] + k * u[j]


@by_threads
def _advance(shape, state, key, update, decay, base, target, like):
    L, S, H, Hk, Dk, Dv = shape
    for task in prange(L * S * H):
        row, h = task // H, task % H
        s = row % S
        if base[s] < target[s]:
            size = like.itemsize
            own = memory(state + task * Dk * Dv * size, (Dk, Dv), like)
            keys = memory(key + row * TAIL * Hk * Dk * size, (TAIL, Hk, Dk), like)
            updates = memory(update + row * TAIL * H * Dv * size, (TAIL, H, Dv), like)
            decays = memory(decay + row * TAIL * H * size, (TAIL, H), like)
            flat = memory(state + task * Dk * Dv * size, Dk * Dv, like)
            for chunk in range(base[s], target[s], CHUNK):
                g = h // (H // Hk)
                at = chunk % TAIL
                add_chunk(own, flat, Dv, at, keys[:, g], updates[:, h], decays[:, h])


def reads_states(*tensors: torch.Tensor) -> bool:
    """True if loops read the memory of all: float32, since float64 is there to compare with."""
    return all(
        x.dtype == torch.float32 and type(x) in PLAIN and x.is_cpu and x.is_contiguous()
        for x in tensors
    )


def advance_state(
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """`advance_state_ref`. Raises TypeError for tensors that loops do not read."""
    given = state, key, update, decay
    require(reads_states(*given), "advance_state", *given)
    L, S, H, Dk, Dv = state.shape
    moved = int((base < target).sum())
    if moved:
        _advance(
            L * moved * H * Dk * Dv * CHUNK, (L, S, H, key.shape[3], Dk, Dv),
            *(x.data_ptr() for x in given), base.numpy(), target.numpy(), LIKE[state.dtype],
        )  # fmt: skip
