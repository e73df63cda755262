"""Check of layers with a recurrent state, which the drawing model does not have."""

from types import SimpleNamespace

import torch

from csd.engine.self_check.trees import Trees
from csd.kernels.ops import Ops
from csd.kernels.states import SSM, DeltaRule, StepStates, commit_states
from csd.state.device import upload
from csd.state.recurrent import CHUNK, ConvSize, StateMemory, StateSize, StateSizes, checkpoint

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 2, 4, 32, 32, 48, 4
# per slot: its length, the parents of its nodes (-1 for the root), accepted nodes. The accepted
# nodes of the first slot pass a position at which states are stored
LENGTHS = (3 * CHUNK - 2, 5, 2 * CHUNK)
PARENTS = ((-1, 0, 1, 1, 2, 4), (-1, 0), (-1,))
ACCEPTED = ((0, 1, 2, 4), (0,), ())


@torch.no_grad()
def run_states(ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
    """Run every operation of layers with a state on random inputs, and commit a step.

    dtype: dtype of the model; states are wider.
    """
    generator = torch.Generator().manual_seed(0)
    # the device with its index
    device = torch.empty(0, device=device).device

    def normal(*shape: int) -> torch.Tensor:
        return upload(torch.randn(shape, generator=generator).to(dtype), device)

    def whole(values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), device)

    trees, lengths = Trees.of(PARENTS, device), whole([*LENGTHS])
    M, S = trees.slot.shape[0], len(LENGTHS)
    pool = SimpleNamespace(
        slot=trees.slot, position=lengths[trees.slot.long()] - 1 + trees.depth,
        ancestors=trees.ancestors, slot_start=trees.slot_start, slot_nodes=trees.slot_nodes,
    )  # fmt: skip
    state = StateSize(KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
    sizes = StateSizes((ConvSize(CHANNELS, WIDTH),), (state, state))
    memory = StateMemory(sizes, S, M, dtype, device)
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
    starts = trees.slot_start.tolist()
    accept = [[starts[s] + i for i in path] for s, path in enumerate(ACCEPTED)]
    most = max(map(len, accept))
    commit_states(
        ops, memory, whole([n + len(a) for n, a in zip(LENGTHS, accept, strict=True)]),
        torch.stack([whole(row + [-1] * (most - len(row))) for row in accept]),
        whole([len(row) for row in accept]),
    )  # fmt: skip
