"""Memory of recurrent layers: that of slots, of prompts, and of a step's nodes.

A slot's state is stored only at its last checkpoint, an absolute position that is a multiple of
CHUNK; of the up to TAIL tokens after it the inputs are stored. These tokens are ancestors of every
node of the slot. A row at position p reads the state of checkpoint

    c(p) = CHUNK floor(max(p - 1 - MAX_DEPTH, 0) / CHUNK)

A node is at most MAX_DEPTH deep, so the tokens before c(p) are committed whatever is drafted, and a
slot of n committed tokens needs no checkpoint before c(n). The result of a row is then a function
of its text alone. Token p is stored at place p % TAIL of a tail, and at place p % (W - 1) of a
convolution with W weights.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from csd.state.pool import MAX_DEPTH
from csd.state.record import allocate, tensor

CHUNK = 16
# most committed tokens after a checkpoint; at least 1 + MAX_DEPTH but near the text's beginning
TAIL = 2 * CHUNK


def checkpoint(position: torch.Tensor) -> torch.Tensor:
    """Checkpoints c(p) of positions p."""
    return (position - 1 - MAX_DEPTH).clamp(min=0) // CHUNK * CHUNK


@dataclass(frozen=True, slots=True)
class ConvSize:
    """A short convolution of each channel with `width` weights."""

    channels: int
    width: int

    def numbers(self) -> int:
        """Numbers per slot."""
        return (self.width - 1) * self.channels


@dataclass(frozen=True, slots=True)
class StateSize:
    """A layer's state: a matrix of key_dim x value_dim for each of `heads` value heads."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    def numbers(self) -> int:
        """Numbers per slot: its state and its tail."""
        return self.heads * self.key_dim * self.value_dim + TAIL * self.of_row()

    def of_row(self) -> int:
        """Numbers per node, or per token of a tail: keys, updates and decays."""
        return self.key_heads * self.key_dim + self.heads * (self.value_dim + 1)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of a model's convolutions and states, each in the order in which it computes them."""

    convs: tuple[ConvSize, ...]
    states: tuple[StateSize, ...]

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per sample, and per prompt; dtype: the model's."""
        inputs = sum(size.numbers() for size in self.convs)
        states = sum(size.numbers() for size in self.states)
        return inputs * dtype.itemsize + states * wide(dtype).itemsize

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per row of a step."""
        inputs = sum(size.channels for size in self.convs)
        states = sum(size.of_row() for size in self.states)
        return inputs * dtype.itemsize + states * wide(dtype).itemsize


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the states of a model with this dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Convs:
    """Inputs of L convolutions of C channels, W weights each, for S slots and M rows."""

    tail: torch.Tensor = tensor("L S w C", None)  # the last w = W - 1 inputs
    node: torch.Tensor = tensor("L M C", None)  # the inputs of a step's nodes


@dataclass(frozen=True, slots=True)
class States:
    """L states of one size, for S slots and M rows; at least float32.

    Hk key heads, H heads; Dk numbers of a key, Dv of a value. A token with its update changes the
    state to decay * state + key update^T.
    """

    state: torch.Tensor = tensor("L S H Dk Dv", None)  # at the slots' checkpoints
    key: torch.Tensor = tensor(f"L S {TAIL} Hk Dk", None)
    update: torch.Tensor = tensor(f"L S {TAIL} H Dv", None)
    decay: torch.Tensor = tensor(f"L S {TAIL} H", None)
    node_key: torch.Tensor = tensor("L M Hk Dk", None)
    node_update: torch.Tensor = tensor("L M H Dv", None)
    node_decay: torch.Tensor = tensor("L M H", None)

    def tails(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Pairs of a nodes' tensor and the tail that accepted rows of it are copied to."""
        return (
            (self.node_key, self.key),
            (self.node_update, self.update),
            (self.node_decay, self.decay),
        )


Size = TypeVar("Size", ConvSize, StateSize)


class StateMemory:
    """Convolutions and states of S slots, and of the M rows of a step."""

    def __init__(
        self,
        sizes: StateSizes,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ):
        self.convs: list[Convs] = []
        self.states: list[States] = []
        # by call: index in the list `convs` or `states`, and layer there
        self.conv_at, convs = _by_size(sizes.convs)
        self.state_at, states = _by_size(sizes.states)

        for conv, L in convs:
            size = {"L": L, "S": slots, "M": rows, "w": conv.width - 1, "C": conv.channels}
            self.convs.append(Convs(**allocate(Convs, size, device, dtype, filled=True)))
        for state, L in states:
            size = {"L": L, "S": slots, "M": rows, "Hk": state.key_heads, "H": state.heads}
            size |= {"Dk": state.key_dim, "Dv": state.value_dim}
            self.states.append(States(**allocate(States, size, device, wide(dtype), filled=True)))
        # the slots' checkpoints, and the checkpoint of a prompt, which the host sets
        self.base = torch.zeros(slots, dtype=torch.int32, device=device)
        self.prompt_base = 0

    def of_slots(self) -> Iterator[torch.Tensor]:
        """All tensors of slots, with the slots in the second dimension, beginning with `base`."""
        yield self.base[None]
        for conv in self.convs:
            yield conv.tail
        for part in self.states:
            yield from (part.state, part.key, part.update, part.decay)

    def copy_slot(self, slot: int, other: "StateMemory") -> None:
        """Copies the only slot of `other` to slot `slot`."""
        for mine, theirs in zip(self.of_slots(), other.of_slots(), strict=True):
            mine[:, slot].copy_(theirs[:, 0])

    def copy(self) -> "StateMemory":
        """A copy of its slots; the rows of a step, which do not outlive it, are shared."""
        made = copy.copy(self)
        made.base = self.base.clone()
        made.convs = [replace(conv, tail=conv.tail.clone()) for conv in self.convs]
        of_slots = "state", "key", "update", "decay"
        made.states = [
            replace(part, **{name: getattr(part, name).clone() for name in of_slots})
            for part in self.states
        ]
        return made


def _by_size(sizes: tuple[Size, ...]) -> tuple[list[tuple[int, int]], list[tuple[Size, int]]]:
    """Each call's (index of its size, index among calls of this size); each size with its count."""
    kinds = list(dict.fromkeys(sizes))
    places = [(kinds.index(size), sizes[:i].count(size)) for i, size in enumerate(sizes)]
    return places, [(kind, sizes.count(kind)) for kind in kinds]


class StateCache:
    """The slots' states, and those of prompts in flight, each stored once per group."""

    def __init__(
        self,
        sizes: StateSizes,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ):
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.slots = StateMemory(sizes, slots, rows, dtype, device)
        self.prompts: dict[int, StateMemory] = {}

    def of_prompt(self, group: int, start: int) -> StateMemory:
        """Memory of a group whose prompt is read from `start` on; a new one if `start` is 0."""
        if start == 0 or group not in self.prompts:
            # its rows hold a chunk of 16 tokens, not a pool
            self.prompts[group] = StateMemory(self.sizes, 1, CHUNK, self.dtype, self.device)
        return self.prompts[group]

    def begin_sample(self, slot: int, group: int) -> None:
        """Sets a slot's states to those after its group's prompt.

        A prompt of one token is not read at all: its memory is then empty.
        """
        self.slots.copy_slot(slot, self.of_prompt(group, 1))
