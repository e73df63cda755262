"""A step of layers with a state, for a check: no model that is drawn from has such layers."""

from types import SimpleNamespace

import torch

from csd.kernels.layer_states import SSM, DeltaRule, StepStates, commit_states
from csd.kernels.ops import Ops
from csd.state.device import upload
from csd.state.recurrent import CHUNK, ConvSize, StateMemory, StateSize, StateSizes, checkpoint

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 2, 4, 32, 32, 48, 4
# of each slot: its length, parents of its nodes (none of its root), accepted nodes. The first one's
# accepted nodes lead past a position at which states are stored
LENGTHS = (3 * CHUNK - 2, 5, 2 * CHUNK)
PARENTS = ((-1, 0, 1, 1, 2, 4), (-1, 0), (-1,))
ACCEPTED = ((0, 1, 2, 4), (0,), ())


@torch.no_grad()
def run_states(ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Run every operation of layers with a state over random texts, and commit a step.

    dtype: of the model; states are wider.
    """
    generator = torch.Generator().manual_seed(0)
    # with its index
    device = torch.empty(0, device=device).device

    def normal(*shape: int) -> torch.Tensor:
        return upload(torch.randn(shape, generator=generator).to(dtype), device)

    def whole(values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), device)

    nodes = [len(parents) for parents in PARENTS]
    starts = [sum(nodes[:s]) for s in range(len(nodes))]
    M, position, ancestors = sum(nodes), [], []
    for length, parents in zip(LENGTHS, PARENTS, strict=True):
        depth: list[int] = []
        words: list[int] = []
        for i, parent in enumerate(parents):
            depth.append(depth[parent] + 1 if i else 0)
            words.append(1 << i | (words[parent] if i else 0))
        position += [length - 1 + d for d in depth]
        ancestors += words
    pool = SimpleNamespace(
        slot=whole([s for s, count in enumerate(nodes) for _ in range(count)]),
        position=whole(position), ancestors=upload(torch.tensor(ancestors), device),
        slot_start=whole(starts), slot_nodes=whole(nodes),
    )  # fmt: skip
    state = StateSize(KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
    sizes = StateSizes((ConvSize(CHANNELS, WIDTH),), (state, state))
    memory = StateMemory(sizes, len(nodes), M, dtype, device)
    memory.base.copy_(checkpoint(pool.position[pool.slot_start.long()]))
    for part in memory.states:
        for x in (part.state, part.key, part.update):
            x.copy_(normal(*x.shape) / KEY_DIM**0.5)
        part.decay.copy_(normal(*part.decay.shape).sigmoid() / 10 + 0.9)
    memory.convs[0].tail.copy_(normal(*memory.convs[0].tail.shape))

    step = StepStates.of(ops, memory, pool)
    step.convolve(0, normal(M, CHANNELS), normal(CHANNELS, WIDTH), normal(CHANNELS), True)
    q, k = normal(M, KEY_HEADS, KEY_DIM), normal(M, KEY_HEADS, KEY_DIM)
    v, share = normal(M, HEADS, VALUE_DIM), normal(M, HEADS).sigmoid()
    step.update(0, DeltaRule(q, k, v, -share / 10, share, normalize=True))
    step.update(1, SSM(v, share, -normal(HEADS).abs(), k, q))
    accept = [[starts[s] + i for i in path] for s, path in enumerate(ACCEPTED)]
    most = max(map(len, accept))
    commit_states(
        ops, memory, whole([n + len(a) for n, a in zip(LENGTHS, accept, strict=True)]),
        torch.stack([whole(row + [-1] * (most - len(row))) for row in accept]),
        whole([len(row) for row in accept]),
    )  # fmt: skip
