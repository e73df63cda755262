"""Which steps draft, where that depends on what drafts bring.

A step without drafts now and then measures what drafts have to beat. A step with drafts that is not
expected to win is a look: it is taken after 2, 4, .. 16 steps, or sooner where looks take little.
Any step drafts only out of a credit, which a step raises by SHARE of itself, and one with drafts by
what it won or lowers by what it lost. So looks take about that share, and so do drafts that are
believed to pay and do not. Where drafts have won, half of that may be lost again before they pause,
up to WON steps: one step that loses says little beside twenty that won. A call begins with what the
last one left of its credit, LEFT at least.
"""

import math

from csd.engine.step_cost import LateSteps

# drafts pay where they bring so many times the tokens a second
GAIN = 1.03
# of the time, for looks; the credit of an engine's first call, what grows back of it at most, and
# the least that a later call has, in steps without drafts
SHARE, CREDIT, REGAINED, LEFT = 0.01, 0.7, 0.4, 0.1
# what it may be more: of the most that the call's drafts have won, and in all
KEPT, WON = 0.5, 2.0
# what a look that may have been disturbed is taken to have lost at most
DOUBTED = 0.25
# one step in EVERY runs without drafts, and of the first ALTERNATE every second one
EVERY, ALTERNATE = 64, 8
# one in CLOSE where the gain is less than MARGINAL
CLOSE, MARGINAL = 16, 1.15
# and, after two steps with drafts that were surprises, one in SOON
SOON = 8
# a look keeps nodes whatever is expected of them where none were kept for so many steps
STALE = 32


class Turns:
    """Of one call."""

    def __init__(self, late: LateSteps):
        self._late = late
        self._timed = False  # whether any step's time is known
        self._steps = self._since = 0  # of the call; of them since the last one without drafts
        self._again = True  # whether a measurement is due: at first, and after a surprise
        self._misses = self._rest = 0
        self._credit = min(max(late.credit, LEFT), CREDIT)
        self._look = math.inf  # what proposing takes, in steps without drafts
        self._won = self._most_won = 0.0  # by the call's drafts, in steps without
        self._gain = 1.0  # of the last few steps
        # whether a look has been launched that has not been read
        self._looking = False
        self._idle = self._lucky = self._surprised = False
        self.trial = False  # whether nodes are kept in this step whatever is expected of them

    def take(self) -> bool:
        """Whether the next step may draft."""
        self._steps += 1
        self._credit = min(self._credit + SHARE, max(self._credit, REGAINED))
        self.trial = False
        if self._rest or self._credit <= 0 or self._looking or self._measures():
            self._idle = self._idle or not self._looking
            self._since = 0
            self._rest = max(self._rest - 1, 0)
            return False
        self._since += 1
        unknown = self._timed and self._late.drafted_age > STALE
        self.trial = self._lucky or (self._idle and unknown)
        self._looking = self._timed and self._idle
        self._idle = False
        return True

    def read(self, asked: bool) -> None:
        """Called when a step's record has been read; asked: whether it might draft."""
        if asked:
            self._looking = False

    def miss(self) -> None:
        """Called when a step's drafts are not expected to pay."""
        self._misses += 1
        # after n steps in a row without a paying node, drafting resumes only after 2^n steps, or as
        # soon as proposing alone takes half of SHARE
        self._rest = int(min(2 ** min(self._misses, 4), max(2 * self._look / SHARE, 2)))

    def learn_plain(self, surprise: bool) -> None:
        """From a step without drafts."""
        self._timed = True
        self._again = surprise

    def learn_drafted(self, gain: float, tokens: float, took: float, surprise: bool) -> None:
        """From a step that drafted.

        gain: of tokens a second, as expected of such a step by now. tokens: what a slot got.
        took: what such a step takes, in steps without drafts.
        """
        self._timed = True
        if surprise and self._surprised and self._since >= SOON:
            self._again = True
        self._surprised = surprise
        self._lucky = False
        self._gain += 0.2 * (gain - self._gain)
        # whatever is expected: drafts that are believed to pay and lose all the same end here. A
        # surprise may be an accident
        lost = min(took - tokens, DOUBTED if surprise else 1.0)
        self._won -= lost
        self._most_won = max(self._most_won, self._won)
        self._credit = min(self._credit - lost, CREDIT + min(KEPT * self._most_won, WON))
        self._late.credit = self._credit
        if gain > GAIN:
            self._misses = self._rest = 0
            return
        # more came true than was expected: one more look
        self._lucky = tokens > GAIN * took
        if not self._lucky:
            self.miss()

    def learn_look(self, took: float, proposing: float) -> None:
        """From a step for which drafts were asked and none kept.

        took: it, in steps without drafts; proposing: of it, or 0 where that is not timed alone.
        """
        self._timed = True
        self._look = min(proposing, 2 * self._look) if proposing else math.inf
        # its own time where that is known: the rest of a step varies by more
        lost = proposing or max(took - 1, -0.5)
        self._credit = min(self._credit - min(lost, 0.5), max(self._credit, CREDIT))

    def _measures(self) -> bool:
        """Whether the next step runs without drafts to be measured."""
        if not self._timed or not self._since:
            return False
        first = self._steps <= ALTERNATE and not self._late.known
        every = CLOSE if self._gain < MARGINAL else EVERY
        return first or self._again or self._since >= every
