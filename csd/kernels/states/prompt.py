"""Recurrent layers over a prompt's tokens, piece by piece."""

from collections.abc import Callable
from typing import Any

import torch

from csd.kernels.states import SSM, DeltaRule, StepStates
from csd.kernels.states.paths import DEPTHS, tree_paths
from csd.state.recurrent import CHUNK, StateMemory, checkpoint
from csd.utils.device import upload

# tokens of a piece for the model's own function; pieces begin at multiples of it
PIECE = 64


class PromptStates:
    """Convolutions and states of a prompt's tokens from `start` on, written to a group's memory.

    Whole pieces of 64 tokens are computed by the model's own function, which takes many tokens at
    once, up to the last checkpoint: no later row reads an earlier state. Pieces begin at multiples
    of 64 tokens of the text, so a prompt's state is the same in every batch. The tokens after them
    are computed as chains of at most 16 nodes.
    """

    def __init__(self, ops: Any, memory: StateMemory, start: int, rows: int):
        self.ops, self.memory, self.start, self.rows = ops, memory, start, rows
        self.device = memory.base.device
        self.base = memory.prompt_base
        self._end = start + rows
        self._last = int(checkpoint(torch.tensor(self._end)))
        self._after: int | None = None  # the new checkpoint, after the first layer

    def convolve(
        self,
        call: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool,
        own: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns the convolution [R, C] of x [R, C] and updates the tail.

        own: the model's convolution of a text [T, C] from its beginning.
        """
        part, layer = self.memory.conv_at[call]
        tail = self.memory.convs[part].tail[layer, 0]
        width = tail.shape[0]
        # by position, the oldest first
        position = torch.arange(self.start - width, self.start, device=self.device)
        before = torch.where((position >= 0)[:, None], tail[position % width], 0)
        text = torch.cat((before, x))
        if own:
            y = own(text)[width:]
        else:
            # the rows form one chain after the tail
            row = torch.arange(self.rows, dtype=torch.int32, device=self.device)
            depth = torch.arange(DEPTHS, dtype=torch.int32, device=self.device)
            path = (row[:, None] - DEPTHS + 1).clamp(min=0) + depth
            where = torch.zeros_like(row), self.start + row, path.where(path <= row[:, None], -1)
            y = self.ops.tree_conv(x, weight, bias, tail[None], *where, silu)
        last = torch.arange(self._end - width, self._end, device=self.device)
        tail.index_copy_(0, last % width, text[-width:])
        return y

    def update(self, call: int, inputs: DeltaRule | SSM) -> torch.Tensor:
        """Returns the outputs [R, H, Dv] and advances the state and the tails."""
        part, layer = self.memory.state_at[call]
        outs, begin, base = [], self.start, self.base
        while begin < self._end:
            whole = (self._last - begin) // PIECE * PIECE
            if inputs.own is not None and begin % PIECE == 0 and whole > 0:
                self._advance(part, layer, base, begin)
                state = self.memory.states[part].state[layer]
                piece = slice(begin - self.start, begin - self.start + whole)
                out, state_after = inputs.own(piece, state)
                state.copy_(state_after)
                outs.append(out.to(state.dtype))
                begin = base = begin + whole
                continue
            rows = min(CHUNK - begin % CHUNK, self._end - begin)
            first = begin - self.start
            chain = inputs.split(slice(first, first + rows))
            outs.append(self._chain(call, chain, begin, rows, base))
            begin += rows
            base = self._commit(part, layer, begin, rows, base)
        self._after = base
        return torch.cat(outs)

    def end(self) -> None:
        """Sets the memory's checkpoint; called after the last layer."""
        if self._after is not None:
            self.memory.prompt_base = self._after
            self.memory.base.fill_(self._after)

    def _whole(self, *values: int) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), self.device)

    def _chain(
        self, call: int, inputs: DeltaRule | SSM, begin: int, rows: int, base: int
    ) -> torch.Tensor:
        word = 2 ** (torch.arange(rows, device=self.device) + 1) - 1
        slot, start = self._whole(*[0] * rows), self._whole(0)
        position = torch.arange(begin, begin + rows, dtype=torch.int32, device=self.device)
        path = tree_paths(slot, word, start)
        slots = start, self._whole(rows), self._whole(base)
        step = StepStates(self.ops, self.memory, slot, position, path, *slots)
        return step.update(call, inputs)

    def _advance(self, part: int, layer: int, base: int, target: int) -> None:
        states = self.memory.states[part]
        stored = states.state, states.key, states.update, states.decay
        one = (x[layer : layer + 1] for x in stored)
        self.ops.advance_state(*one, self._whole(base), self._whole(target))

    def _commit(self, part: int, layer: int, length: int, rows: int, base: int) -> int:
        """Copies the last `rows` of `length` tokens to the tail; returns the new checkpoint."""
        target = max(base, int(checkpoint(torch.tensor(length))))
        self._advance(part, layer, base, target)
        accepted = torch.arange(rows, dtype=torch.int32, device=self.device)[None]
        for node, tail in self.memory.states[part].tails():
            self.ops.commit_tail(
                node[layer : layer + 1].flatten(2),
                tail[layer : layer + 1].flatten(3),
                self._whole(length),
                accepted,
                self._whole(rows),
            )
        return target
