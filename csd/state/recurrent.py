"""Memory of layers with a state: the slots', the prompts', and that of a step's nodes.

A slot's state is kept at its last checkpoint only, an absolute position that is a multiple of
CHUNK; of the TAIL tokens behind it, or fewer, the inputs are kept. They are ancestors of every node
of the slot. A row at position p reads the state of checkpoint

    c(p) = CHUNK floor(max(p - 1 - MAX_DEPTH, 0) / CHUNK)

A node is at most MAX_DEPTH deep, so the tokens before c(p) are committed whatever is drafted, and a
slot of n committed tokens needs no checkpoint before c(n). What a row computes is then a function
of its text alone. Token p of a tail lies at place p % TAIL, token p of a convolution with W weights
at place p % (W - 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from csd.state.pool import MAX_DEPTH

CHUNK = 16
# committed tokens behind a checkpoint: 1 + MAX_DEPTH to this, fewer near the text's beginning
TAIL = 2 * CHUNK


def checkpoint(position: torch.Tensor) -> torch.Tensor:
    """c(p) of positions."""
    return (position - 1 - MAX_DEPTH).clamp(min=0) // CHUNK * CHUNK


@dataclass(frozen=True, slots=True)
class ConvSize:
    """A short convolution of each channel with `width` weights."""

    channels: int
    width: int

    def numbers(self) -> int:
        """Numbers of a slot."""
        return (self.width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class StateSize:
    """A layer's state: a matrix of key_dim x value_dim for each of `heads` value heads."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    def numbers(self) -> int:
        """Numbers of a slot: its state and its tail."""
        return self.heads * self.key_dim * self.value_dim + TAIL * self.of_row()

    def of_row(self) -> int:
        """Numbers of a node, or of a token of a tail: keys, updates and decays."""
        return self.key_heads * self.key_dim + self.heads * (self.value_dim + 1)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The convolutions and the states of a model, each in the order in which it computes them."""

    convs: tuple[ConvSize, ...]
    states: tuple[StateSize, ...]

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sample, and of a prompt; dtype: the model's."""
        inputs = sum(size.numbers() for size in self.convs)
        states = sum(size.numbers() for size in self.states)
        return inputs * dtype.itemsize + states * wide(dtype).itemsize

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row of a step."""
        inputs = sum(size.channels for size in self.convs)
        states = sum(size.of_row() for size in self.states)
        return inputs * dtype.itemsize + states * wide(dtype).itemsize


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the states of a model of a dtype: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Convs:
    """Convolutions of one size; L of them, S slots, M rows, W weights a channel."""

    tail: torch.Tensor  # [L, S, W - 1, channels], the last inputs
    node: torch.Tensor  # [L, M, channels], those of a step's nodes


@dataclass(frozen=True, slots=True)
class States:
    """States of one size; L of them, S slots, M rows, Hk key heads, H heads, all float32 or wider.

    A token's update is what the rule adds to the state with the token's key: state = decay * state
    + key update^T.
    """

    state: torch.Tensor  # [L, S, H, key_dim, value_dim], at the slots' checkpoints
    key: torch.Tensor  # [L, S, TAIL, Hk, key_dim]
    update: torch.Tensor  # [L, S, TAIL, H, value_dim]
    decay: torch.Tensor  # [L, S, TAIL, H]
    node_key: torch.Tensor  # [L, M, Hk, key_dim]
    node_update: torch.Tensor  # [L, M, H, value_dim]
    node_decay: torch.Tensor  # [L, M, H]

    def tails(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Nodes' numbers with the tails that these move to."""
        return (
            (self.node_key, self.key), (self.node_update, self.update),
            (self.node_decay, self.decay),
        )  # fmt: skip


Size = TypeVar("Size", ConvSize, StateSize)


class StateMemory:
    """Convolutions and states of S slots, and of the M rows of a step."""

    def __init__(
        self, sizes: StateSizes, slots: int, rows: int, dtype: torch.dtype,
        device: str | torch.device,
    ):  # fmt: skip
        self.convs: list[Convs] = []
        self.states: list[States] = []
        # by call: the entry of the list that has it, and its layer there
        self.conv_at, convs = _by_size(sizes.convs)
        self.state_at, states = _by_size(sizes.states)

        def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        for conv, L in convs:
            self.convs.append(Convs(zeros(L, slots, conv.width - 1, conv.channels),
                                    zeros(L, rows, conv.channels)))  # fmt: skip
        for size, L in states:
            Hk, H, Dk, Dv = size.key_heads, size.heads, size.key_dim, size.value_dim
            kind = wide(dtype)
            self.states.append(States(
                zeros(L, slots, H, Dk, Dv, kind=kind), zeros(L, slots, TAIL, Hk, Dk, kind=kind),
                zeros(L, slots, TAIL, H, Dv, kind=kind), zeros(L, slots, TAIL, H, kind=kind),
                zeros(L, rows, Hk, Dk, kind=kind), zeros(L, rows, H, Dv, kind=kind),
                zeros(L, rows, H, kind=kind),
            ))  # fmt: skip
        # the slots' checkpoints; that of a prompt is decided by the host
        self.base = torch.zeros(slots, dtype=torch.int32, device=device)
        self.prompt_base = 0

    def of_slots(self) -> Iterator[torch.Tensor]:
        """All tensors of slots, with these in the second dimension, the first of `base`'s."""
        yield self.base[None]
        for conv in self.convs:
            yield conv.tail
        for part in self.states:
            yield from (part.state, part.key, part.update, part.decay)

    def copy_slot(self, slot: int, other: "StateMemory") -> None:
        """Slot `slot` becomes as the only one of `other`."""
        for mine, theirs in zip(self.of_slots(), other.of_slots(), strict=True):
            mine[:, slot].copy_(theirs[:, 0])


def _by_size(sizes: tuple[Size, ...]) -> tuple[list[tuple[int, int]], list[tuple[Size, int]]]:
    """Each call's place among those of its size; the sizes, and how many calls have each."""
    kinds = list(dict.fromkeys(sizes))
    places = [(kinds.index(size), sizes[:i].count(size)) for i, size in enumerate(sizes)]
    return places, [(kind, sizes.count(kind)) for kind in kinds]


class StateCache:
    """The slots' states, and those of prompts in flight, each stored once a group."""

    def __init__(
        self, sizes: StateSizes, slots: int, rows: int, dtype: torch.dtype,
        device: str | torch.device,
    ):  # fmt: skip
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.slots = StateMemory(sizes, slots, rows, dtype, device)
        self.prompts: dict[int, StateMemory] = {}

    def of_prompt(self, group: int, start: int) -> StateMemory:
        """The memory of a group whose prompt is read from `start` on; a new one from 0 on."""
        if start == 0 or group not in self.prompts:
            # its rows are a chunk of 16 and no pool
            self.prompts[group] = StateMemory(self.sizes, 1, CHUNK, self.dtype, self.device)
        return self.prompts[group]

    def begin_sample(self, slot: int, group: int) -> None:
        """A slot begins behind its group's prompt, which may be one token and not read at all."""
        self.slots.copy_slot(slot, self.of_prompt(group, 1))

    def free_prompt(self, group: int) -> None:
        self.prompts.pop(group, None)
