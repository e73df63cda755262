"""Types of the functions that a call gives results to, or asks whether they are enough."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from csd.engine.results.result import Sample

# True if the first samples of a prompt, the argument, are enough
Until = Callable[[list[Sample]], bool]


@runtime_checkable
class UntilRule(Protocol):
    """A rule that makes an `Until` for the number of samples of a prompt, as `csd.Vote` does."""

    @property
    def needs_text(self) -> bool:
        """True if the rule reads the samples' texts."""

    def of(self, total: int) -> Until:
        """The `until` of a prompt with `total` samples."""


# called once per step with (prompt index, sample index, new tokens, their text)
OnText = Callable[[int, int, list[int], str], Any]
