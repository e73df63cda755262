"""Earlier samples of a prompt, as rows that enter its group's graph.

A sample enters like a prompt's text: each of its tokens follows those before it, the prompt's last
ones at its start. With y the token, p_u the target's top 8 probabilities where they are known, and
`halved` the halvings for age:

    without top    weight(y) = history_weight
    with top       weight(u) = round(p_u * soft_weight) + hard_weight * [u = y]
    all            >> halved
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from csd.kernels.observe import SUCCESSORS
from csd.state.context_table import ANY, GraphConfig
from csd.state.verdict import TOP

# a sample that is older weighs nothing
MAX_HALVED = 16
# tokens of the longest context that another prompt's sample enters
SHORT = 2


@dataclass(frozen=True, slots=True)
class Earlier:
    """A sample of an earlier call."""

    tokens: np.ndarray  # [T] int32
    top: tuple[np.ndarray, np.ndarray] | None = None  # [T, 8] int32, -1 is none, and [T, 8] float16
    halved: int = 0  # how many times its weight is halved, for its age
    foreign: bool = False  # another prompt's: it enters contexts of at most SHORT tokens

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        top: Sequence | None = None,
        halved: int = 0,
        foreign: bool = False,
    ) -> "Earlier":
        """From lists; top: (token ids, probabilities) of each position, likeliest first."""
        tops = None if top is None else _arrays(top)
        return cls(np.asarray(tokens, np.int32), tops, halved, foreign)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(x.nbytes for x in self.top or ())


def _arrays(top: Sequence) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(top), TOP), -1, np.int32)
    probs = np.zeros((len(top), TOP), np.float16)
    for at, (tokens, values) in enumerate(top):
        n = min(len(tokens), TOP)
        ids[at, :n], probs[at, :n] = tokens[:n], values[:n]
    return ids, probs


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows as `graph_insert` takes them, on the host; U = 9 successors each."""

    context: np.ndarray  # [R, N] int32, latest first
    token: np.ndarray  # [R, U] int32
    weight: np.ndarray  # [R, U] int32
    total: np.ndarray  # [R] int32

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(self.context[part], self.token[part], self.weight[part], self.total[part])

    @classmethod
    def join(cls, parts: list["Rows"]) -> "Rows":
        names = ("context", "token", "weight", "total")
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def __len__(self) -> int:
        return len(self.total)


def history_rows(prompt: Sequence[int], earlier: Earlier, config: GraphConfig) -> Rows:
    """One sample's rows: of its positions, and of what the group says after anything."""
    N, T, halved = config.context, len(earlier.tokens), earlier.halved
    y = earlier.tokens
    before = [] if earlier.foreign else prompt[-N:]
    text = np.concatenate([np.full(N, -1), np.asarray(before, np.int32), y])[-(N + T) :]
    context = np.lib.stride_tricks.sliding_window_view(text, N)[:T, ::-1]
    if earlier.foreign:
        context = np.where(np.arange(N) < SHORT, context, -1)
    token = np.full((T, SUCCESSORS), -1, np.int32)
    weight = np.zeros((T, SUCCESSORS), np.int32)
    if earlier.top is None:
        token[:, 0], weight[:, 0] = y, config.history_weight
        total = np.full(T, config.history_weight)
    else:
        ids, probs = earlier.top
        top = np.rint(probs.astype(float) * config.soft_weight).astype(np.int32)
        known = top.any(1)
        hard = np.where(known, config.hard_weight, config.history_weight)
        drawn = (ids == y[:, None]) & (top > 0)
        token[:, :TOP], token[:, TOP] = ids, y
        weight[:, :TOP] = top + drawn * hard[:, None]
        weight[:, TOP] = np.where(drawn.any(1), 0, hard)
        total = hard + known * config.soft_weight
    # after anything: SUCCESSORS tokens a row
    spoken = np.pad(y, (0, -T % SUCCESSORS), constant_values=-1).reshape(-1, SUCCESSORS)
    anywhere = (spoken >= 0) * config.history_weight
    any_context = np.full((len(spoken), N), -1)
    any_context[:, 0] = ANY
    weight = np.concatenate([weight, anywhere]) >> halved
    # shifting rounds down, so a row's weights stay within its total
    total = np.concatenate([total, anywhere.sum(1)]) >> halved
    return Rows(
        np.concatenate([context, any_context]).astype(np.int32),
        np.concatenate([token, spoken]).astype(np.int32),
        weight.astype(np.int32),
        total.astype(np.int32),
    )


def pieces(
    prompt: Sequence[int], history: Iterable[Earlier], config: GraphConfig, size: int
) -> Iterator[Rows]:
    """The rows of all samples, `size` of them at a time, made when they are asked for."""
    held: list[Rows] = []
    for earlier in history:
        if earlier.halved > MAX_HALVED or not len(earlier):
            continue
        held.append(history_rows(prompt, earlier, config))
        while sum(map(len, held)) >= size:
            rows = Rows.join(held)
            yield rows[:size]
            held = [rows[size:]]
    if sum(map(len, held)):
        yield Rows.join(held)
