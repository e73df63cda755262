"""The gate that decides which steps of a call may draft."""

from csd.engine.budget.estimator import RECENT

# share of the time for probes, and for steps without drafts that are measured
EXPLORE = 0.01
# what a call's drafts may lose before they pause, in steps without drafts; of what they won, up to
# 4 times as much may be lost again
CREDIT = 1.0
# steps of the longest cool-down
COOLDOWN = 16


class SpeculationGate:
    """Lets steps draft out of a credit, and runs steps without drafts to be measured.

    A step with drafts adds the tokens that it committed a slot and takes off its time, in steps
    without drafts. After n steps in a row whose drafts do not pay, the next one, a probe, comes
    after 2^n steps.
    """

    def __init__(self) -> None:
        self._credit = CREDIT
        self._gain = 1.0  # tokens per second of drafted steps, relative to steps without drafts
        self._since = 0  # steps since the last one without drafts
        self._measured = 0  # steps without drafts
        self._outliers = 0  # in a row
        self._failures = self._cooldown = 0
        self.probe = False  # whether the step drafts although no gain is expected

    def should_draft(self) -> bool:
        """True if the next step may draft; called once a step."""
        self._credit = min(self._credit + EXPLORE, max(self._credit, CREDIT))
        self._since += 1
        if self._cooldown or self._credit <= 0 or self._should_measure():
            self._cooldown = max(self._cooldown - 1, 0)
            self._since, self.probe = 0, False
            return False
        self.probe = 2**self._failures >= COOLDOWN
        return True

    def _should_measure(self) -> bool:
        """True if a step without drafts is due: for two outliers, and as often as `EXPLORE` pays.

        It takes as long as ever and commits 1 / gain of the tokens.
        """
        if self._since < 2:
            return False
        every = max(COOLDOWN, (1 - 1 / max(self._gain, 1.0)) / EXPLORE)
        return self._measured < 3 or self._outliers >= 2 or self._since > every

    def measured(self, outlier: bool) -> None:
        """Update from a step without drafts."""
        self._measured += 1
        # it may be an accident: the next one decides
        self._outliers = 2 if outlier else 0

    def drafted(self, tokens: float, took: float, pays: bool, outlier: bool) -> None:
        """Update from a step with drafts.

        tokens: committed a slot; took: its time, in steps without drafts; pays: whether such a step
        is expected to win; outlier: whether its time was one.
        """
        self._outliers = self._outliers + 1 if outlier else 0
        self._gain += (tokens / took - self._gain) / RECENT
        self.spend(took - tokens)
        if pays:
            self._failures = 0
        else:
            self.back_off()

    def spend(self, lost: float) -> None:
        """Take a loss, in steps without drafts, off the credit; a gain is a negative loss."""
        self._credit = min(self._credit - lost, 4 * CREDIT)

    def back_off(self) -> None:
        """Begin a cool-down, twice as long as the last one in a row."""
        self._failures = min(self._failures + 1, COOLDOWN.bit_length() - 1)
        self._cooldown = 2**self._failures
