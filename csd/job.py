"""Host side of a call: one Job a prompt, one Running a sample in flight."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from csd.drafts import SOURCES, Draft
from csd.result import Sample, Samples, Stats
from csd.sampling import SamplingParams
from csd.text import StopStrings, TextStream


@dataclass(slots=True)
class Job:
    """A prompt and its samples, from waiting to finished."""

    index: int
    prompt: list[int]
    params: SamplingParams
    samples: range  # the sample indices to draw
    seed: int
    key: int
    waiting: deque = field(init=False)
    running: dict = field(default_factory=dict)  # sample index -> Running
    finished: dict = field(default_factory=dict)  # sample index -> Sample
    top: dict = field(default_factory=dict)  # sample index -> (ids, probabilities) per token
    asked: int = 0  # the samples of the prefix that `until` has been asked about
    group: int = -1
    pages: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.waiting = deque(self.samples)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    def prefix(self) -> list[Sample]:
        """Finished samples up to the first index that has not finished.

        Who finishes first depends on lengths, so only this prefix may decide anything.
        """
        found = []
        for i in self.samples:
            if i not in self.finished:
                break
            found.append(self.finished[i])
        return found

    def decided(self, until: Callable[[list[Sample]], bool]) -> bool:
        """Whether `until` has seen enough, asked about each longer prefix in turn.

        How many samples finish at once depends on the batch. The shortest prefix that decides does
        not, so what finished beyond it is cancelled like the rest.
        """
        prefix = self.prefix()
        while self.asked < len(prefix):
            self.asked += 1
            if until(prefix[: self.asked]):
                for i in self.samples[self.asked :]:
                    if i in self.finished:
                        self.finished[i] = replace(self.finished[i], finish_reason="cancelled")
                return True
        return False

    def result(self) -> Samples:
        """All samples; those that have not finished are `cancelled` with what they have."""
        rest = {i: r.sample("cancelled") for i, r in self.running.items()}
        rest |= {i: _nothing(i) for i in self.waiting}
        every = {**rest, **self.finished}
        return Samples([every[i] for i in self.samples], self.seed, self.prompt, self.stats)


def _nothing(index: int) -> Sample:
    return Sample(index, None, [], [], [], "cancelled")


class Running:
    """A sample in flight: what the host has seen of it, which may lag behind the device."""

    def __init__(self, job: Job, index: int, pages: list[int], tokenizer: Any):
        self.job = job
        self.index = index
        self.pages = pages
        self.done = False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.sources: list[str] = []
        self.steps: list[int] = []  # the step that committed each token
        self.drafts: list[Draft] = []
        self.top: list[tuple[list[int], list[float]]] = []
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._stop = StopStrings(job.params.stop) if job.params.stop else None
        self._cut: int | None = None

    def append(
        self,
        tokens: list[int],
        logprobs: list[float],
        raw_logprobs: list[float],
        sources: list[int],
        stream_text: bool,
    ) -> str:
        """Add a step's tokens up to the one that completes a stop string; returns their text."""
        text = ""
        for row in zip(tokens, logprobs, raw_logprobs, sources, strict=True):
            self.tokens.append(row[0])
            self.logprobs.append(row[1])
            self.raw_logprobs.append(row[2])
            self.sources.append(SOURCES[row[3]])
            if self._stream is not None and (self._stop or stream_text):
                added = self._stream.push(row[0])
                text += added
                if self._stop and added:
                    self._cut = self._stop.find(self._stream.text, len(added))
                    if self._cut is not None:
                        break
        return text

    @property
    def stopped(self) -> bool:
        """A stop string has been found."""
        return self._cut is not None

    def sample(self, reason: str) -> Sample:
        text = None
        if self._cut is not None and self._stream is not None:
            text = self._stream.text[: self._cut]
        elif self._tokenizer is not None:
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        return Sample(
            self.index,
            text,
            self.tokens,
            self.logprobs,
            self.raw_logprobs,
            reason,
            self.sources,
            self.steps,
            self.drafts,
        )


# gets each slot's new tokens, and their text, once a step
OnTokens = Callable[[Job, Running, list[int], str], None]
# whether the first samples of a prompt are enough
Until = Callable[[list[Sample]], bool]
