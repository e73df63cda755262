"""State of a request: its place while it is in flight, and its samples from waiting to finished."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from csd.engine.results.logprobs import PromptScores
from csd.engine.results.result import Sample, Until
from csd.engine.results.stats import Stats
from csd.utils.torch_state import calling


@dataclass(slots=True)
class Placement:
    """Place of a request in flight, which slots give it (`csd/engine/slots.py`)."""

    group: int = -1
    pages: list[int] = field(default_factory=list)  # of its prompt
    units: list[bytes] | None = None  # digests of the prompt's units in the prefix index
    graph_key: int = -1  # of the group's graph
    # equal for requests in flight whose samples may share rows: those of equal prompts in a scope
    text: int = -1


@dataclass(slots=True)
class Progress:
    """Samples of a request, from waiting to finished, and what else is known of it."""

    samples: range  # the sample indices to draw
    waiting: deque[int] = field(init=False)  # indices without a slot
    live: dict[int, Any] = field(default_factory=dict)  # sample index -> LiveSample
    finished: dict[int, Sample] = field(default_factory=dict)  # by sample index
    awaited: set[int] = field(default_factory=set)  # sample indices that another request draws
    top: dict = field(default_factory=dict)  # sample index -> (ids, probabilities) per token
    checked: int = 0  # length of the longest prefix that `until` has been called with
    decided: bool = False  # whether `until` has ended it
    fault: BaseException | None = None  # raised in a step by what this request alone asks for
    error: str | None = None  # reason why the request is not served, or not to its end
    errors: dict[int, Exception] = field(default_factory=dict)  # of samples that cannot continue
    scores: PromptScores | None = None  # if requested: of the prompt's tokens read so far
    # whether the prompt leaves a thought open, once it was read: one that has the tags of
    # templates, and one that its budget counts
    in_thought: bool | None = None
    in_budget: bool = False
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.waiting = deque(self.samples)

    @property
    def done(self) -> bool:
        return not (self.waiting or self.live or self.awaited)

    def whole(self, until: Until | None) -> bool:
        """True if all samples have ended, those included that `until` has cancelled, and none in an
        error."""
        if not self.done or len(self.finished) < len(self.samples) or self.errors:
            return False
        # an error may have come between the last sample's end and the decision
        return until is None or self.decided or self.checked == len(self.samples)

    def prefix(self) -> list[Sample]:
        """Finished samples before the first unfinished index.

        The order in which samples finish depends on their lengths, so `until` sees only this
        prefix.
        """
        samples = []
        for i in self.samples:
            if i not in self.finished:
                break
            samples.append(self.finished[i])
        return samples

    def satisfies(self, until: Until | None) -> bool:
        """True if `until` is satisfied; it is called with each longer prefix in turn.

        The number of samples that finish at once depends on the batch. The shortest prefix that
        satisfies `until` does not, so samples that finished beyond it are cancelled like the rest.
        """
        if until is None:
            return False
        prefix = self.prefix()
        while self.checked < len(prefix):
            self.checked += 1
            with calling("until"):
                ends = _is_true(until(prefix[: self.checked]))
            if ends:
                self.decided = True
                for i in self.samples[self.checked :]:
                    if i in self.finished:
                        self.errors.pop(i, None)
                        self.finished[i] = replace(
                            self.finished[i], finish_reason="cancelled", error=None
                        )
                return True
        return False


def _is_true(answer: Any) -> bool:
    try:
        return bool(answer)
    # arrays of several values and decisions of a vote have no truth
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"until must return True or False, got a {type(answer).__name__}: {error}"
        ) from error
