"""Training of a kind of head: its weights, and the losses of a batch."""

from typing import Any, Protocol

from csd.training.head_parts import DraftHead
from csd.training.texts import Text


class Method(Protocol):
    """Sums of losses are an object of the method, with `add` and, by its places, `mean`."""

    @property
    def head(self) -> DraftHead: ...

    def none(self) -> Any:
        """The sums of no batch."""

    def losses(self, texts: list[Text], step: int | None = None) -> Any:
        """The sums of a batch. With the number of an optimizer's step, gradients of the mean are
        added to the head's."""

    def mean(self, found: Any) -> float:
        """The loss of each place."""

    def acceptance(self, found: Any) -> dict[str, Any]:
        """Columns of the curve; of no place, each is None."""
