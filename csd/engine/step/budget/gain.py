"""Gain of a call's drafts, by its measured steps.

A step without drafts commits one token per live slot. So a step over L live slots that commits n
tokens replaces n / L steps without drafts, and the gain of a call is

    sum over its steps of (n / L) (seconds of a step without drafts over L rows)
    / sum over its steps of (seconds of the step, drafting included)

A step that ran without drafts took its own seconds, less those of drafting. The seconds of the
others are the estimates by which the budget was chosen (`estimator`).
"""

from dataclasses import dataclass

# fewest steps from which a gain is computed
FEWEST = 16


@dataclass(slots=True)
class Gain:
    """Sums over the steps of a call."""

    steps: int = 0
    seconds: float = 0.0
    plain: float = 0.0  # seconds without drafts
    live: int = 0  # most live slots of a step

    def add(self, live_count: int, tokens: int, seconds: float, plain: float) -> None:
        """Add a step; plain: seconds of a step without drafts over as many slots."""
        self.steps += 1
        self.seconds += seconds
        self.plain += plain * tokens / live_count
        self.live = max(self.live, live_count)

    @property
    def ratio(self) -> float | None:
        """Seconds without drafts divided by seconds with them; None for too few steps."""
        return self.plain / self.seconds if self.steps >= FEWEST and self.seconds else None
