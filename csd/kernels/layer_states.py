"""Layers with a state as a decoder calls them, one after another: of a step's rows, of a prompt's.

Beside `csd.kernels.layer_attention`. Calls are numbered by kind, as `csd.state.recurrent.StateSizes`
lists them. What comes of a call's inputs goes to the rows of the state memory, from which
`commit_states` moves what a step has accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from csd.kernels.tree_paths import tree_paths
from csd.state.recurrent import CHUNK, ConvSize, StateMemory, checkpoint

# positions at which a prompt is cut into pieces for a model's own function
PIECE = 64


@dataclass(slots=True)
class DeltaRule:
    """A call of the gated delta rule over M rows, in the model's dtype."""

    q: torch.Tensor  # [M, Hk, Dk]
    k: torch.Tensor  # [M, Hk, Dk]
    v: torch.Tensor  # [M, H, Dv]
    log_decay: torch.Tensor  # [M, H]
    strength: torch.Tensor  # [M, H]
    normalize: bool  # whether q and k are divided by their lengths
    # rows, a state [1, H, Dk, Dv] -> their outputs [M, H, Dv], the state behind them
    own: Callable | None = None

    def split(self, rows: slice) -> "DeltaRule":
        parts = (x[rows] for x in (self.q, self.k, self.v, self.log_decay, self.strength))
        return DeltaRule(*parts, self.normalize)

    def inputs(self, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled queries, keys and decays."""
        q, k = self.q.to(kind), self.k.to(kind)
        if self.normalize:
            # as transformers has it
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return (q * q.shape[-1] ** -0.5).contiguous(), k, self.log_decay.to(kind).exp()


@dataclass(slots=True)
class SSM:
    """A call of Mamba-2 over M rows; what is added of x itself is the caller's."""

    x: torch.Tensor  # [M, H, Dv]
    dt: torch.Tensor  # [M, H], positive
    A: torch.Tensor  # [H], negative
    B: torch.Tensor  # [M, Hk, Dk]
    C: torch.Tensor  # [M, Hk, Dk]
    own: Callable | None = None

    def split(self, rows: slice) -> "SSM":
        return SSM(self.x[rows], self.dt[rows], self.A, self.B[rows], self.C[rows])

    def inputs(self, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and decays."""
        decay = (self.dt.to(kind) * self.A.to(kind)).exp()
        return self.C.to(kind).contiguous(), self.B.to(kind), decay


@dataclass(slots=True)
class StepStates:
    """Convolutions and states of a step's rows."""

    ops: Any  # with tree_conv, tree_delta_rule and tree_ssm
    memory: StateMemory
    slot: torch.Tensor  # [M] int32
    position: torch.Tensor  # [M] int32
    path: torch.Tensor  # [M, DEPTHS] int32
    slot_start: torch.Tensor  # [S] int32
    slot_nodes: torch.Tensor  # [S] int32
    base: torch.Tensor  # [S] int32

    @classmethod
    def of(cls, ops: Any, memory: StateMemory, pool: Any) -> "StepStates":
        """pool: a `csd.state.pool.Pool`, or what has its slot, position, ancestors, slot_start and
        slot_nodes."""
        path = tree_paths(pool.slot, pool.ancestors, pool.slot_start)
        return cls(
            ops, memory, pool.slot, pool.position, path, pool.slot_start, pool.slot_nodes,
            memory.base,
        )  # fmt: skip

    def convolve(
        self, call: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        silu: bool,
    ) -> torch.Tensor:  # fmt: skip
        """x: [M, C], weight: [C, W]. Returns [M, C]."""
        part, layer = self.memory.conv_at[call]
        convs = self.memory.convs[part]
        node = convs.node[layer, : x.shape[0]]
        node.copy_(x)
        return self.ops.tree_conv(
            node, weight, bias, convs.tail[layer], self.slot, self.position, self.path, silu
        )

    def update(self, call: int, given: DeltaRule | SSM) -> torch.Tensor:
        """Outputs [M, H, Dv] in the states' dtype."""
        part, layer = self.memory.state_at[call]
        states, M = self.memory.states[part], self.slot.shape[0]
        kind = states.state.dtype
        q, k, decay = given.inputs(kind)
        nodes = states.node_key, states.node_decay, states.node_update
        node_key, node_decay, node_update = (x[layer, :M] for x in nodes)
        node_key.copy_(k)
        node_decay.copy_(decay)
        kept = (x[layer] for x in (states.state, states.key, states.update, states.decay))
        rest = (
            node_key, node_decay, node_update, *kept, self.base, self.slot, self.position,
            self.path, self.slot_start, self.slot_nodes,
        )  # fmt: skip
        if isinstance(given, SSM):
            torch.mul(given.dt.to(kind)[..., None], given.x.to(kind), out=node_update)
            return self.ops.tree_ssm(q, *rest)
        v, b = given.v.to(kind).contiguous(), given.strength.to(kind).contiguous()
        return self.ops.tree_delta_rule(q, v, b, *rest)


def commit_states(
    ops: Any,
    memory: StateMemory,
    length: torch.Tensor,  # [S] int32, committed tokens of each slot, the accepted ones included
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
) -> None:
    """Accepted rows' inputs move to the slots' tails, and states to the checkpoints that follow.

    States first: what a chunk adds is in the tail whole before its places are taken.
    """
    target = torch.where(accept_count > 0, checkpoint(length), memory.base)
    target = torch.maximum(target, memory.base).int()
    for part in memory.states:
        ops.advance_state(part.state, part.key, part.update, part.decay, memory.base, target)
        for node, tail in part.tails():
            ops.commit_tail(node.flatten(2), tail.flatten(3), length, accept_row, accept_count)
    for convs in memory.convs:
        ops.commit_tail(convs.node, convs.tail, length, accept_row, accept_count)
    memory.base.copy_(target)


class PromptStates:
    """Convolutions and states of a prompt's tokens from `start` on, into a group's memory.

    Whole pieces of 64 tokens go through the model's own function, which has a form for many tokens
    at once, as far as no row to come reads a state before their end. Pieces begin at multiples of
    64 of the text, so a prompt's state is the same in every batch. The tokens behind them are
    chains of at most 16 nodes.
    """

    def __init__(self, ops: Any, memory: StateMemory, start: int, rows: int):
        self.ops, self.memory, self.start, self.rows = ops, memory, start, rows
        self.device = memory.base.device
        self.base = int(memory.base[0])  # a prompt is read by the host, between two steps
        self._end = start + rows
        self._last = int(checkpoint(torch.tensor(self._end)))
        self._after: int | None = None  # the checkpoint once a layer has been read

    def convolve(
        self, call: int, x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """x: [R, C]. own: the convolution of a text [T, C] that nothing precedes. Returns [R, C]."""
        part, layer = self.memory.conv_at[call]
        tail = self.memory.convs[part].tail[layer, 0]
        kept = tail.shape[0]
        # by position, the oldest first
        place = torch.arange(self.start - kept, self.start, device=self.device)
        before = torch.where((place >= 0)[:, None], tail[place % kept], 0)
        text = torch.cat((before, x))
        last = torch.arange(self._end - kept, self._end, device=self.device)
        tail.index_copy_(0, last % kept, text[-kept:])
        return own(text)[kept:]

    def update(self, call: int, given: DeltaRule | SSM) -> torch.Tensor:
        """Outputs [R, H, Dv]."""
        part, layer = self.memory.state_at[call]
        outs, at, base = [], self.start, self.base
        while at < self._end:
            whole = (self._last - at) // PIECE * PIECE
            if given.own is not None and at % PIECE == 0 and whole > 0:
                self._advance(part, layer, base, at)
                state = self.memory.states[part].state[layer]
                rows = slice(at - self.start, at - self.start + whole)
                out, behind = given.own(rows, state)
                state.copy_(behind)
                outs.append(out.to(state.dtype))
                at = base = at + whole
                continue
            rows = min(CHUNK - at % CHUNK, self._end - at)
            first = at - self.start
            chain = given.split(slice(first, first + rows))
            outs.append(self._chain(call, chain, at, rows, base))
            at += rows
            base = self._commit(part, layer, at, rows, base)
        self._after = base
        return torch.cat(outs)

    def end(self) -> None:
        """All layers have been read."""
        if self._after is not None:
            self.memory.base.fill_(self._after)

    def _whole(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _chain(
        self, call: int, given: DeltaRule | SSM, at: int, rows: int, base: int
    ) -> torch.Tensor:
        word = 2 ** (torch.arange(rows, device=self.device) + 1) - 1
        slot, start = self._whole(*[0] * rows), self._whole(0)
        position = torch.arange(at, at + rows, dtype=torch.int32, device=self.device)
        path = tree_paths(slot, word, start)
        step = StepStates(
            self.ops, self.memory, slot, position, path, start, self._whole(rows),
            self._whole(base),
        )  # fmt: skip
        return step.update(call, given)

    def _advance(self, part: int, layer: int, base: int, target: int) -> None:
        states = self.memory.states[part]
        kept = states.state, states.key, states.update, states.decay
        one = (x[layer : layer + 1] for x in kept)
        self.ops.advance_state(*one, self._whole(base), self._whole(target))

    def _commit(self, part: int, layer: int, length: int, rows: int, base: int) -> int:
        """The last `rows` of a text of `length` tokens into the tail; the checkpoint then."""
        target = max(base, int(checkpoint(torch.tensor(length))))
        self._advance(part, layer, base, target)
        accepted = torch.arange(rows, dtype=torch.int32, device=self.device)[None]
        for node, tail in self.memory.states[part].tails():
            self.ops.commit_tail(
                node[layer : layer + 1].flatten(2), tail[layer : layer + 1].flatten(3),
                self._whole(length), accepted, self._whole(rows),
            )  # fmt: skip
        return target
