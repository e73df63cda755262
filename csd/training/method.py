"""Interface for training a kind of head: its weights, and the losses of a batch."""

from typing import Any, Protocol

from csd.training.head_parts import DraftHead
from csd.training.texts import Text


class Method(Protocol):
    """Training of one kind of head. Sums of losses are an object of the method's own class, which
    has `add`."""

    @property
    def head(self) -> DraftHead: ...

    def none(self) -> Any:
        """Sums of losses at zero."""

    def losses(self, texts: list[Text], step: int | None = None) -> Any:
        """Sums of a batch. With the number of an optimizer step, gradients of the mean are added to
        the head's gradients."""

    def mean(self, found: Any) -> float:
        """Mean loss per position."""

    def acceptance(self, found: Any) -> dict[str, Any]:
        """Acceptance columns of the curve; each is None without positions."""
