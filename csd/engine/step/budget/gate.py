"""The gate that decides which steps of a call may draft."""

from csd.engine.step.budget.estimator import RECENT

# share of the time spent on probes and on measuring steps without drafts
EXPLORE = 0.01
# loss after which a call's drafts pause, in steps without drafts; gains raise the limit up to 4
# times as high
CREDIT = 1.0
# length of the longest cool-down, in steps
COOLDOWN = 16


class SpeculationGate:
    """Lets steps draft while a credit lasts, and schedules steps without drafts for measurement.

    A step with drafts adds the tokens that it committed per slot to the credit and subtracts its
    time, in steps without drafts. After n consecutive steps whose drafts do not pay, the next step
    with drafts, a probe, follows 2^n steps later.
    """

    def __init__(self) -> None:
        self._credit = CREDIT
        self._gain = 1.0  # tokens per second of drafted steps, relative to steps without drafts
        self._since = 0  # steps since the last one without drafts
        self._measured = 0  # number of steps without drafts
        self._outliers = 0  # consecutive ones
        self._failures = self._cooldown = 0
        self.probe = False  # whether the step drafts even if no gain is expected

    def should_draft(self) -> bool:
        """True if the next step may draft; called once per step."""
        self._credit = min(self._credit + EXPLORE, max(self._credit, CREDIT))
        self._since += 1
        if self._cooldown or self._credit <= 0 or self._should_measure():
            self._cooldown = max(self._cooldown - 1, 0)
            self._since, self.probe = 0, False
            return False
        self.probe = 2**self._failures >= COOLDOWN
        return True

    def _should_measure(self) -> bool:
        """True if a step without drafts is due: after 2 outliers, or as often as `EXPLORE` allows.

        Such a step commits only 1 / gain of the tokens that drafted steps commit in its time.
        """
        if self._since < 2:
            return False
        every = max(COOLDOWN, (1 - 1 / max(self._gain, 1.0)) / EXPLORE)
        return self._measured < 3 or self._outliers >= 2 or self._since > every

    def measured(self, outlier: bool) -> None:
        """Update from a step without drafts."""
        self._measured += 1
        # the outlier may be an accident: one more step without drafts decides
        self._outliers = 2 if outlier else 0

    def drafted(self, tokens: float, took: float, pays: bool, outlier: bool) -> None:
        """Update from a step with drafts.

        tokens: committed per slot; took: its time, in steps without drafts; pays: whether such a
        step is expected to win; outlier: whether its time was an outlier.
        """
        self._outliers = self._outliers + 1 if outlier else 0
        self._gain += (tokens / took - self._gain) / RECENT
        self.spend(took - tokens)
        if pays:
            self._failures = 0
        else:
            self.back_off()

    def spend(self, lost: float) -> None:
        """Subtract a loss, in steps without drafts, from the credit; a gain is a negative loss."""
        self._credit = min(self._credit - lost, 4 * CREDIT)

    def back_off(self) -> None:
        """Begin a cool-down, twice as long as the last consecutive one, at most `COOLDOWN`."""
        self._failures = min(self._failures + 1, COOLDOWN.bit_length() - 1)
        self._cooldown = 2**self._failures
