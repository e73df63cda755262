"""Recurrent layers of a step's rows, as the decoder calls them, layer by layer.

The counterpart of `csd.kernels.attention.layer`; `prompt.py` computes a prompt's tokens.
Calls are numbered by kind, as `csd.state.recurrent.StateSizes` lists them. The values computed from
a call's inputs are written to the node rows of the state memory, from which `commit_states` copies
the rows that a step has accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from csd.kernels.states.paths import tree_paths
from csd.state.recurrent import StateMemory, checkpoint


@dataclass(slots=True)
class DeltaRule:
    """A call of the gated delta rule over M rows, in the model's dtype."""

    q: torch.Tensor  # [M, Hk, Dk]
    k: torch.Tensor  # [M, Hk, Dk]
    v: torch.Tensor  # [M, H, Dv]
    log_decay: torch.Tensor  # [M, H]
    strength: torch.Tensor  # [M, H]
    normalize: bool  # whether q and k are divided by their norms
    # (rows, state [1, H, Dk, Dv]) -> (their outputs [M, H, Dv], the state after them)
    own: Callable | None = None

    def split(self, rows: slice) -> "DeltaRule":
        every = self.q, self.k, self.v, self.log_decay, self.strength
        q, k, v, log_decay, strength = (x[rows] for x in every)
        return DeltaRule(q, k, v, log_decay, strength, self.normalize)

    def inputs(
        self, ops: Any, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns scaled queries, keys and decays, of dtype `kind`."""
        q, k = self.q.to(kind), self.k.to(kind)
        if self.normalize:
            q, k = _unit(ops, q), _unit(ops, k)
        return (q * q.shape[-1] ** -0.5).contiguous(), k, self.log_decay.to(kind).exp()


def _unit(ops: Any, x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|^2 + 1e-6), as in transformers.

    Computed by the RMS norm as x / sqrt(mean + eps) times Dk^-1/2, whose bits do not depend on the
    number of rows.
    """
    size = x.shape[-1]
    y: torch.Tensor = ops.rms_norm(x, x.new_full((size,), size**-0.5), 1e-6 / size)[0]
    return y


@dataclass(slots=True)
class SSM:
    """A call of Mamba-2 over M rows; the caller adds the term D x."""

    x: torch.Tensor  # [M, H, Dv]
    dt: torch.Tensor  # [M, H], positive
    A: torch.Tensor  # [H], negative
    B: torch.Tensor  # [M, Hk, Dk]
    C: torch.Tensor  # [M, Hk, Dk]
    own: Callable | None = None

    def split(self, rows: slice) -> "SSM":
        return SSM(self.x[rows], self.dt[rows], self.A, self.B[rows], self.C[rows])

    def inputs(
        self, ops: Any, kind: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and decays, of dtype `kind`."""
        decay = (self.dt.to(kind) * self.A.to(kind)).exp()
        return self.C.to(kind).contiguous(), self.B.to(kind), decay


@dataclass(slots=True)
class StepStates:
    """Convolutions and states of a step's rows."""

    ops: Any  # with rms_norm, tree_conv, tree_delta_rule and tree_ssm
    memory: StateMemory
    slot: torch.Tensor  # [M] int32
    position: torch.Tensor  # [M] int32
    path: torch.Tensor  # [M, DEPTHS] int32
    slot_start: torch.Tensor  # [S] int32
    slot_nodes: torch.Tensor  # [S] int32
    base: torch.Tensor  # [S] int32

    @classmethod
    def of(cls, ops: Any, memory: StateMemory, pool: Any) -> "StepStates":
        """Computes the paths of a pool's rows and returns their states.

        pool: a `csd.state.pool.Pool`, or another object with its fields slot, position, ancestors,
        slot_start and slot_nodes.
        """
        path = tree_paths(pool.slot, pool.ancestors, pool.slot_start)
        slots = pool.slot_start, pool.slot_nodes, memory.base
        return cls(ops, memory, pool.slot, pool.position, path, *slots)

    def convolve(
        self,
        call: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
    ) -> torch.Tensor:
        """Keeps x [M, C] for `commit_states` and returns its convolution [M, C]; weight: [C, W]."""
        part, layer = self.memory.conv_at[call]
        convs = self.memory.convs[part]
        node = convs.node[layer, : x.shape[0]]
        node.copy_(x)
        return self.ops.tree_conv(
            node, weight, bias, convs.tail[layer], self.slot, self.position, self.path, silu
        )

    def update(self, call: int, inputs: DeltaRule | SSM) -> torch.Tensor:
        """Returns the outputs [M, H, Dv] in the states' dtype."""
        part, layer = self.memory.state_at[call]
        states, M = self.memory.states[part], self.slot.shape[0]
        kind = states.state.dtype
        q, k, decay = inputs.inputs(self.ops, kind)
        of_layers = states.node_key, states.node_decay, states.node_update
        nodes = node_key, node_decay, node_update = tuple(x[layer, :M] for x in of_layers)
        node_key.copy_(k)
        node_decay.copy_(decay)
        stored = (x[layer] for x in (states.state, states.key, states.update, states.decay))
        where = self.base, self.slot, self.position, self.path, self.slot_start, self.slot_nodes
        rest = *nodes, *stored, *where
        if isinstance(inputs, SSM):
            torch.mul(inputs.dt.to(kind)[..., None], inputs.x.to(kind), out=node_update)
            return self.ops.tree_ssm(q, *rest)
        v, b = inputs.v.to(kind).contiguous(), inputs.strength.to(kind).contiguous()
        return self.ops.tree_delta_rule(q, v, b, *rest)


def commit_states(
    ops: Any,
    memory: StateMemory,
    length: torch.Tensor,  # [S] int32, committed tokens of each slot, the accepted ones included
    accept_row: torch.Tensor,  # [S, A] int32, -1 padded
    accept_count: torch.Tensor,  # [S] int32
) -> None:
    """Copies accepted rows to the slots' tails, and advances states to the next checkpoints.

    States first: the tail holds all tokens of the added chunks until new ones overwrite them.
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
