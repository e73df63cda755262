"""Jobs of operations of layers with a state: the call, bytes moved, and a check."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from bench.micro.jobs.step_state import Sizes, StepJob
from csd.kernels.ops import Ops, reference
from csd.kernels.states import DeltaRule, StepStates, commit_states
from csd.state.recurrent import ConvSize, StateMemory, StateSize, StateSizes, checkpoint

# a layer of Qwen3-Next: convolution (channels, width); key heads, value heads and their sizes
QWEN3_NEXT = StateSizes((ConvSize(8192, 4),), (StateSize(16, 32, 128, 128),))
TINY = StateSizes((ConvSize(64, 4),), (StateSize(2, 4, 16, 16),))
BOUND = 1e-5


class StateStep:
    """Slots in the middle of their texts, each with an equal number of nodes: chain and leaves."""

    def __init__(
        self,
        ops: Ops,
        sizes: StateSizes,
        slots: int,
        rows: int,
        text: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.ops, self.sizes, self.slots, self.rows, self.text = ops, sizes, slots, rows, text
        generator = torch.Generator().manual_seed(seed)
        self.memory = StateMemory(sizes, slots, rows, dtype, device)
        wide = torch.promote_types(dtype, torch.float32)

        def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, kind)

        for x in self.memory.of_slots():
            if x.is_floating_point():
                x.copy_(normal(*x.shape, kind=x.dtype))
        for part in self.memory.states:
            # keys of norm about 1, decays below 1
            part.key.mul_(part.key.shape[-1] ** -0.5)
            part.decay.copy_(part.decay.sigmoid())
        lengths = torch.full((slots,), text, dtype=torch.int32, device=device)
        self.memory.base.copy_(checkpoint(lengths))
        each = rows // slots
        node = torch.arange(each).repeat(slots)
        # half of the nodes, at most nine, are a chain, the rest are leaves of its last node
        chain = min(9, (each + 1) // 2)
        word = torch.where(node < chain, 2 ** (node + 1) - 1, 2**chain - 1 + 2**node)
        depth = torch.where(node < chain, node, chain)
        self.pool = SimpleNamespace(
            slot=torch.arange(slots, dtype=torch.int32).repeat_interleave(each).to(device),
            position=(text + depth).int().to(device),
            ancestors=word.to(device),
            slot_start=(torch.arange(slots, dtype=torch.int32) * each).to(device),
            slot_nodes=torch.full((slots,), each, dtype=torch.int32, device=device),
        )
        self.states = StepStates.of(ops, self.memory, self.pool)
        conv, size = sizes.convs[0], sizes.states[0]
        self.conv = normal(rows, conv.channels), normal(conv.channels, conv.width)
        keys, values = (rows, size.key_heads, size.key_dim), (rows, size.heads, size.value_dim)
        self.rule = DeltaRule(
            normal(*keys),
            normal(*keys),
            normal(*values),
            -normal(rows, size.heads).abs().to(wide),
            normal(rows, size.heads).sigmoid(),
            True,
        )

    def convolve(self) -> torch.Tensor:
        return self.states.convolve(0, *self.conv, None, True)

    def update(self) -> torch.Tensor:
        return self.states.update(0, self.rule)

    def core(self) -> None:
        """Run csd's part of a mixer in a step: convolution and delta rule."""
        self.convolve()
        self.update()

    def commit(self) -> None:
        """Commit two rows of each slot; states advance by a chunk when the text completes one."""
        count = torch.full_like(self.memory.base, 2)
        rows = self.pool.slot_start[:, None] + torch.arange(2, device=count.device).int()
        length = torch.full_like(count, self.text + 2)
        commit_states(self.ops, self.memory, length, rows, count)

    def again(self, ops: Ops, dtype: torch.dtype) -> torch.Tensor:
        """Result of `update` with other operations and another dtype."""
        other = StateStep(ops, self.sizes, self.slots, self.rows, self.text, dtype=dtype)
        return other.update()


def makers(ops: Ops, tiny: bool, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict:
    """Builders of jobs by the operation's name; each takes a seed."""
    of = TINY if tiny else QWEN3_NEXT
    rows = sizes.rows // sizes.slots * sizes.slots

    def built(seed: int) -> StateStep:
        return StateStep(ops, of, sizes.slots, rows, sizes.text, seed, device, dtype)

    def update(seed: int) -> StepJob:
        step = built(0)
        part = step.memory.states[0]

        def check() -> None:
            exact = step.again(reference(), torch.float64)
            off = (step.update().cpu().double() - exact).abs().max() / exact.abs().max()
            assert off <= BOUND, f"off by {off:.2g}"

        return _job(step, step.update, check, part.state.nbytes)

    def conv(seed: int) -> StepJob:
        step = built(seed)

        def check() -> None:
            want = StateStep(reference(), of, sizes.slots, rows, sizes.text, seed).convolve()
            torch.testing.assert_close(step.convolve().cpu(), want, rtol=1e-4, atol=1e-5)

        return _job(step, step.convolve, check, 2 * step.conv[0].nbytes)

    def commit(seed: int) -> StepJob:
        step = built(seed)
        step.core()

        def check() -> None:
            before = int(step.memory.base[0])
            step.commit()
            assert int(step.memory.base[0]) >= before, "a checkpoint went back"

        return _job(step, step.commit, check, 0)

    return {"tree_delta_rule": update, "tree_conv": conv, "commit_states": commit}


def _job(step: StateStep, call: Callable, check: Callable, moved: int) -> StepJob:
    size = f"S={step.slots} M={step.rows}"
    footprint = sum(x.nbytes for x in step.memory.of_slots())
    return StepJob(size, moved, footprint, call, check)
