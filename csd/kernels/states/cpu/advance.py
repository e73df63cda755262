"""`csd.kernels.advance_state` as a loop; loops that read states use its step of one chunk."""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.lanes import BLOCK, WIDTH, add_multiple, block, lanes, put
from csd.kernels.numba.tensors import LIKE, PLAIN, memory, require
from csd.kernels.numba.threads import by_threads, share
from csd.state.recurrent import CHUNK, TAIL


@loop
def add_chunk(shape, state, moved, wide, first, key, update, decay, gaps):
    """moved[i, :Dv] = row i of the state after CHUNK more tokens of the tail, from `first` on.

    All arrays are flat. state: [Dk, Dv]; moved: rows `wide` numbers apart, or `state` itself; key,
    update and decay: one head's of a tail, with tokens `gaps` numbers apart.
    """
    Dk, Dv = shape
    of_key, of_update, of_decay = gaps
    nothing = np.zeros(WIDTH, state.dtype)
    whole, blocks = Dv // WIDTH * WIDTH, Dv // BLOCK * BLOCK
    for i in range(Dk):
        row, to = i * Dv, i * wide
        for j in range(0, whole, WIDTH):
            numbers = lanes(state, row + j)
            for t in range(first, first + CHUNK):
                numbers = add_multiple(lanes(nothing, 0), decay[t * of_decay], numbers)
                u = lanes(update, t * of_update + j)
                numbers = add_multiple(numbers, key[t * of_key + i], u)
            put(numbers, moved, to + j)
        for j in range(whole, blocks, BLOCK):
            few = block(state, row + j)
            for t in range(first, first + CHUNK):
                few = add_multiple(block(nothing, 0), decay[t * of_decay], few)
                few = add_multiple(few, key[t * of_key + i], block(update, t * of_update + j))
            put(few, moved, to + j)
        for j in range(blocks, Dv):
            number = state[row + j]
            for t in range(first, first + CHUNK):
                decayed = decay[t * of_decay] * number
                number = decayed + key[t * of_key + i] * update[t * of_update + j]
            moved[to + j] = number


@loop
def head_of_tail(shape, row, g, h, key, update, decay, like):
    """Flat keys, updates and decays of slot `row`'s tail, from key head g or head h on."""
    H, Hk, Dk, Dv = shape
    size = like.itemsize
    keys = memory(key + (row * TAIL * Hk + g) * Dk * size, (TAIL * Hk - g) * Dk, like)
    updates = memory(update + (row * TAIL * H + h) * Dv * size, (TAIL * H - h) * Dv, like)
    return keys, updates, memory(decay + (row * TAIL * H + h) * size, TAIL * H - h, like)


@by_threads
def _advance(part, parts, shape, state, key, update, decay, base, target, like):
    """Advance all layers' states [L, S, H, Dk, Dv] in place from base to target, chunk by chunk."""
    L, S, H, Hk, Dk, Dv = shape
    first, last = share(L * S * H, part, parts)
    for task in range(first, last):
        row, h = task // H, task % H
        s = row % S
        if base[s] < target[s]:
            size = like.itemsize
            own, g = memory(state + task * Dk * Dv * size, Dk * Dv, like), h // (H // Hk)
            keys, updates, decays = head_of_tail(
                (H, Hk, Dk, Dv), row, g, h, key, update, decay, like
            )
            gaps = Hk * Dk, H * Dv, H
            for chunk in range(base[s], target[s], CHUNK):
                offset = chunk % TAIL
                add_chunk((Dk, Dv), own, own, Dv, offset, keys, updates, decays, gaps)


def reads_states(*tensors: torch.Tensor) -> bool:
    """True if loops read all tensors: float32 only, since float64 serves for comparisons."""
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
    """Advances the states from base to target in place, as `advance_state_ref`.

    Raises TypeError for tensors that loops do not read.
    """
    tensors = state, key, update, decay
    require(reads_states(*tensors), "advance_state", *tensors)
    L, S, H, Dk, Dv = state.shape
    moved = int((base < target).sum())
    if moved:
        _advance(
            L * moved * H * Dk * Dv * CHUNK,
            (L, S, H, key.shape[3], Dk, Dv),
            *(x.data_ptr() for x in tensors),
            base.numpy(),
            target.numpy(),
            LIKE[state.dtype],
        )
