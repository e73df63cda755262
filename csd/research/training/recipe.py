"""Settings of a head's training, and the interface for training a kind of head.

A `Recipe` includes settings that only one kind of head has. A `Method` has the weights of a head,
and the losses of a batch.
"""

from dataclasses import asdict, dataclass
from typing import Any

from csd.research.training.head_parts import DraftHead
from csd.research.training.texts import Text
from csd.utils.arguments import check_number, check_seed, check_whole
from csd.utils.check import shown


@dataclass(slots=True)
class Losses:
    """Sums over positions. states: of the loss of states. Lists with an entry for each token of a
    chain: tokens, of its cross-entropy; hits, of correctly drafted next tokens; places, of 1."""

    tokens: list[float]
    hits: list[int]
    places: list[int]
    states: float = 0.0

    @classmethod
    def none(cls, depth: int) -> "Losses":
        return cls([0.0] * depth, [0] * depth, [0] * depth)

    def add(self, other: "Losses") -> None:
        self.states += other.states
        for step in range(len(self.places)):
            self.tokens[step] += other.tokens[step]
            self.hits[step] += other.hits[step]
            self.places[step] += other.places[step]

    def mean(self, weights: list[float]) -> float:
        """L over all positions; weights: of the cross-entropy of each token."""
        by_token = sum(w * x for w, x in zip(weights, self.tokens, strict=True))
        return (self.states + by_token) / self.places[0]

    @property
    def acceptance(self) -> list[float | None]:
        """Shares of the samples' tokens that are the head's likeliest; None without positions."""
        pairs = zip(self.hits, self.places, strict=True)
        return [hits / places if places else None for hits, places in pairs]


class Method:
    """Training of one kind of head."""

    head: DraftHead
    weights: list[float]  # of the cross-entropy of each token of a chain

    def losses(self, texts: list[Text], step: int | None = None) -> Losses:
        """Sums of a batch. With the number of an optimizer step, gradients of the mean are added to
        the head's gradients."""
        raise NotImplementedError

    def acceptance(self, measured: Losses) -> dict[str, Any]:
        """Acceptance columns of the curve; each is None without positions."""
        return {"acceptance": measured.acceptance[0]}


# limited, because the order of all epochs is computed before the first step
MAX_EPOCHS = 10_000
# limited, because each token of a chain adds its own keys to attention
DEEPEST = 64
# kind of head -> its own arguments and their defaults
OWN: dict[int, dict[str, Any]] = {
    2: {"token_weight": 0.1, "noise": 0.1},
    3: {"depth": 5, "decay": 0.8, "draft_vocab": None},
}


@dataclass(frozen=True)
class Recipe:
    """Arguments of `train_head` with these names; None for arguments of the other kind of head."""

    epochs: int = 4
    batch: int = 2048
    learning_rate: float = 5e-4
    held_out: float = 0.05
    every: int = 100
    seed: int = 0
    eagle: int = 2
    token_weight: float | None = None
    noise: float | None = None
    depth: int | None = None
    decay: float | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1, MAX_EPOCHS)
        for name in ("batch", "every"):
            check_whole(name, getattr(self, name), 1)
        check_number("learning_rate", self.learning_rate, 0, above=True)
        check_number("held_out", self.held_out, 0, 0.5)
        check_seed("seed", self.seed)
        check_whole("eagle", self.eagle, 0)
        if self.eagle not in OWN:
            raise ValueError(f"eagle must be 2 (EAGLE-1 and EAGLE-2) or 3, got {shown(self.eagle)}")
        self._check_own()
        for name in ("token_weight", "noise"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0)
        if self.depth is not None:
            check_whole("depth", self.depth, 1, DEEPEST)
        if self.decay is not None:
            check_number("decay", self.decay, 0, 1, above=True)
        if self.draft_vocab is not None:
            check_whole("draft_vocab", self.draft_vocab, 1)

    def _check_own(self) -> None:
        """Set defaults of this kind's arguments; raises ValueError for an argument of another."""
        for eagle, own in OWN.items():
            for name, default in own.items():
                value = getattr(self, name)
                if eagle == self.eagle:
                    object.__setattr__(self, name, default if value is None else value)
                elif value is not None:
                    raise ValueError(
                        f"{name} is an argument of eagle={eagle}, got {name}={shown(value)} with "
                        f"eagle={self.eagle}"
                    )

    def settings(self) -> dict[str, Any]:
        """Values of the arguments that this kind of head has."""
        return {name: value for name, value in asdict(self).items() if value is not None}
