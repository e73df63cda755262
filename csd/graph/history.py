"""Past samples of a prompt, as rows of its group's graph, and the capacity of the graph's table.

A sample is inserted like a prompt's text: each of its tokens is a successor of the tokens before
it, at its start of the prompt's last ones. With y the token and p_u the target's top 8
probabilities, if recorded:

    without top    weight(y) = history_weight
    with top       weight(u) = round(p_u * soft_weight) + hard_weight * [u = y]
    both           >> age
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from csd.kernels.table.rows import SUCCESSORS
from csd.state.context_table import ANY, GraphConfig, Table
from csd.state.verdict import TOP
from csd.utils.device import upload

# the weights of an older sample would be rounded down to 0
MAX_AGE = 16


@dataclass(frozen=True, slots=True)
class PastSample:
    """A sample of a previous call."""

    tokens: np.ndarray  # [T] int32
    top: tuple[np.ndarray, np.ndarray] | None = None  # [T, 8] int32, -1 is none, and [T, 8] float16
    age: int = 0  # halvings of its weight

    @classmethod
    def of(cls, tokens: Sequence[int], top: Sequence | None = None) -> "PastSample":
        """Convert lists; top: (token ids, probabilities) of each position, likeliest first."""
        if top is None:
            return cls(np.asarray(tokens, np.int32))
        ids = np.full((len(top), TOP), -1, np.int32)
        probs = np.zeros((len(top), TOP), np.float16)
        for row, (likely, values) in enumerate(top):
            n = min(len(likely), TOP)
            ids[row, :n], probs[row, :n] = likely[:n], values[:n]
        return cls(np.asarray(tokens, np.int32), (ids, probs))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(x.nbytes for x in self.top or ())


@dataclass(frozen=True, slots=True)
class InsertRows:
    """R rows of `graph_insert`, on the host; U = 9 successors each."""

    context: np.ndarray  # [R, N] int32, latest first
    token: np.ndarray  # [R, U] int32
    weight: np.ndarray  # [R, U] int32
    total: np.ndarray  # [R] int32

    def insert(
        self,
        table: Table,
        graph_insert: Callable,
        group_key: int,
        source: int,
        live_groups: torch.Tensor,  # [G] int64
        orders: tuple[int, ...],
    ) -> None:
        """Insert the rows as a group's. source: bit of their source, 0 for none."""
        device, count = table.step.device, len(self)
        rows = (self.context, self.token, self.weight, self.total)
        graph_insert(
            table,
            torch.full((count,), group_key, device=device),
            *(upload(torch.from_numpy(x), device) for x in rows),
            torch.full((count,), source, dtype=torch.int32, device=device),
            live_groups,
            orders,
        )

    def __getitem__(self, part: slice | np.ndarray) -> "InsertRows":
        return InsertRows(self.context[part], self.token[part], self.weight[part], self.total[part])

    @classmethod
    def join(cls, parts: list["InsertRows"]) -> "InsertRows":
        names = ("context", "token", "weight", "total")
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def __len__(self) -> int:
        return len(self.total)


def history_rows(prompt: Sequence[int], sample: PastSample, config: GraphConfig) -> InsertRows:
    """Rows of one sample: one per position, then those of the context of any token."""
    N, T, age = config.context, len(sample.tokens), sample.age
    y = sample.tokens
    text = np.concatenate([np.full(N, -1), np.asarray(prompt[-N:], np.int32), y])[-(N + T) :]
    context = np.lib.stride_tricks.sliding_window_view(text, N)[:T, ::-1]
    token = np.full((T, SUCCESSORS), -1, np.int32)
    weight = np.zeros((T, SUCCESSORS), np.int32)
    if sample.top is None:
        token[:, 0], weight[:, 0] = y, config.history_weight
        total = np.full(T, config.history_weight)
    else:
        ids, probs = sample.top
        top = np.rint(probs.astype(float) * config.soft_weight).astype(np.int32)
        has_top = top.any(1)
        hard = np.where(has_top, config.hard_weight, config.history_weight)
        drawn = (ids == y[:, None]) & (top > 0)
        token[:, :TOP], token[:, TOP] = ids, y
        weight[:, :TOP] = top + drawn * hard[:, None]
        weight[:, TOP] = np.where(drawn.any(1), 0, hard)
        total = hard + has_top * config.soft_weight
    # the context of any token: SUCCESSORS tokens per row
    anywhere_token = np.pad(y, (0, -T % SUCCESSORS), constant_values=-1).reshape(-1, SUCCESSORS)
    anywhere = (anywhere_token >= 0) * config.history_weight
    any_context = np.full((len(anywhere_token), N), -1)
    any_context[:, 0] = ANY
    weight = np.concatenate([weight, anywhere]) >> age
    # shifting rounds down, so a row's weights stay within its total
    total = np.concatenate([total, anywhere.sum(1)]) >> age
    return InsertRows(
        np.concatenate([context, any_context]).astype(np.int32),
        np.concatenate([token, anywhere_token]).astype(np.int32),
        weight.astype(np.int32),
        total.astype(np.int32),
    )


def pieces(
    prompt: Sequence[int], history: Iterable[PastSample], config: GraphConfig, size: int
) -> Iterator[InsertRows]:
    """Yield the rows of all samples, `size` of them at a time."""
    pending: list[InsertRows] = []
    for sample in history:
        if sample.age > MAX_AGE or not len(sample):
            continue
        pending.append(history_rows(prompt, sample, config))
        while sum(map(len, pending)) >= size:
            rows = InsertRows.join(pending)
            yield rows[:size]
            pending = [rows[size:]]
    if sum(map(len, pending)):
        yield InsertRows.join(pending)


# contexts of a table, which take 41 and 330 MB with the sizes of `GraphConfig`
MIN_CAPACITY, MAX_CAPACITY = 1 << 17, 1 << 20


def capacity_for(tokens: int, config: GraphConfig) -> int:
    """Contexts of a table for `tokens` tokens, each of which follows one context per order."""
    wanted = tokens * len(config.orders)
    return min(max(MIN_CAPACITY, 1 << max(wanted - 1, 0).bit_length()), MAX_CAPACITY)


def max_history(history: Sequence[PastSample], groups: int, config: GraphConfig) -> int:
    """Number of a prompt's past samples that fit, newest first.

    Past samples take at most half of the largest table, in equal parts for the groups in flight.
    """
    room = MAX_CAPACITY // (2 * len(config.orders) * groups)
    return sum(tokens <= room for tokens in accumulate(map(len, history)))
