"""Self-consistency: majority vote, with early stopping."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from csd.engine.options.thinking import after_thoughts
from csd.engine.results.result import Sample
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import (
    EXTRACTORS,
    Answer,
    answer_of,
    boxed,
    extractor,
    last_number,
    stated,
)
from csd.evaluate.answers.units import Answers, Key, Labels, labels_of
from csd.utils.arguments import check_number, each
from csd.utils.check import shown

__all__ = ["Decision", "Vote", "answer_of", "boxed", "drawn", "last_number", "stated", "vote"]


@dataclass(frozen=True, slots=True)
class Decision:
    answer: str | None  # None if no sample has an answer
    count: float  # votes, or weight, of the answer
    total: float  # votes, or weight, of all samples that have an answer
    answers: list[str | None]  # one per counted sample
    thoughts_cut: int = 0  # counted samples whose thought max_thinking_tokens ended
    second: float = 0  # votes, or weight, of the answer in second place
    limited: int = 0  # counted samples without a vote, because max_new_tokens cut them

    @property
    def tied(self) -> bool:
        """True if another answer has as many votes; `answer` is then the first of them."""
        return self.answer is not None and self.second >= self.count

    def __bool__(self) -> bool:
        raise TypeError(
            "a Decision is neither true nor false: read .answer, or .tied for a majority; to stop "
            "once the majority is certain, pass until=csd.Vote()"
        )

    def __str__(self) -> str:
        """The answer with its share of the votes, or "no majority"."""
        cut = f", {self.limited} of them cut at max_new_tokens" if self.limited else ""
        if self.answer is None:
            return f"no answer in {len(self.answers)} samples{cut}"
        voted = sum(answer is not None for answer in self.answers)
        share = f"{_amount(self.count)} of {_amount(self.total)}"
        if self.tied:
            return f"no majority: {self.answer} has {share} votes, as many as another answer"
        silent = len(self.answers) - voted
        rest = f", {silent} of {len(self.answers)} samples without an answer{cut}" if silent else ""
        part = self.count / self.total if self.total else 1.0
        return f"{self.answer} ({share} votes, {part:.0%}{rest})"


def _amount(votes: float) -> str:
    return f"{votes:.0f}" if votes == int(votes) else f"{votes:.2f}"


def drawn(samples: Iterable[Sample]) -> list[Sample]:
    """The samples before the first cancelled one; `samples` are in the order of their indices.

    Samples that finish first are shorter and agree more than the rest, so a finished sample does
    not count if a sample with a lower index was cancelled.
    """
    drawn_samples = []
    for sample in each("samples", samples, "the result of csd.generate for one prompt"):
        if not isinstance(sample, Sample):
            raise TypeError(
                "samples must be the result of csd.generate for one prompt, or a list of Sample, "
                f"got a {type(sample).__name__} in it"
            )
        if sample.finish_reason == "cancelled":
            break
        drawn_samples.append(sample)
    return drawn_samples


def counts(sample: Sample, limited: bool) -> bool:
    """True if a sample votes: the last number of a cut text is often not its answer, and a sample
    that could not continue has none."""
    return sample.finish_reason != "error" and (limited or sample.finish_reason != "length")


def mean_logprob(sample: Sample) -> float:
    """Mean log-probability of a sample's tokens, including the end token."""
    if not sample.logprobs:
        raise ValueError(f"sample {sample.index} has no tokens, so no mean log-probability")
    return sum(sample.logprobs) / len(sample.logprobs)


def probability(sample: Sample) -> float:
    """exp of the mean log-probability per token, the weight of Wang et al. 2022 (2203.11171)."""
    mean = mean_logprob(sample)
    # slightly above 0 is rounding
    if not mean < 1e-3:
        raise ValueError(
            f"sample {sample.index} must have a finite mean log-probability, got {mean}"
        )
    return math.exp(mean)


def vote(
    samples: Iterable[Sample],
    extract: str | Callable[[str], str | None] = answer_of,
    weight: str | Callable[[Sample], float] | None = None,
    limited: bool = False,
) -> Decision:
    """Majority vote over the answers of the samples before the first cancelled one.

    samples: the `Samples` that `csd.generate` returns for a prompt, or a list of `Sample`.
    extract: a function that returns the answer in a text, or None; or "boxed", "stated" (after "the
        answer is"), "number" (the last), "letter" (of an option), or "any" (the last statement,
        boxed or said, else the last number). With these five names, the text is read without its
        thoughts, and different spellings (0.5, 1/2, \\frac12) are the same answer, in the spelling
        of the lowest index; 5 hours and 5 minutes differ, and 5 is the first of them; a function
        gets the whole text, and its results are compared unchanged.
    weight: a function of a sample; None gives each weight 1; "probability" is the exp of the mean
        log-probability per token. Ties go to the answer of the lowest index; `tied` is then True.
    limited: True if samples that were cut at `max_new_tokens` vote; by default they have no answer,
        because the last number of an unfinished text is often not its answer.

    Raises ValueError for a weight that is negative or not finite, and for samples without text;
    ImportError for an answer that is an expression, such as x^2, without the extra `latex`.
    """
    read = extractor(extract)
    if isinstance(weight, str) and weight == "probability":
        weight = probability
    elif weight is not None and not callable(weight):
        raise ValueError(f"weight must be a function, 'probability' or None, got {shown(weight)}")
    voters = drawn(samples)
    thoughts_cut = sum(any(sample.forced) for sample in voters)
    without = sum(sample.finish_reason == "length" for sample in voters if not limited)
    spelling: dict[Key, str] = {}
    answers, distinct = [], Answers()
    for sample in voters:
        answer = read(_text_for(extract, sample)) if counts(sample, limited) else None
        if answer is not None:
            key = distinct.key(*_compared(extract, answer))
            if key not in spelling:
                taken = answer in spelling.values()
                spelling[key] = key.spelling(answer) if taken else str(answer)
            answer = spelling[key]
        answers.append(answer)
    votes: dict[str, float] = {}
    for sample, answer in zip(voters, answers, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + (1 if weight is None else _of(weight, sample))
    if not votes:
        return Decision(None, 0, 0, answers, thoughts_cut, limited=without)
    best, second = _leader(votes)
    return Decision(best, votes[best], sum(votes.values()), answers, thoughts_cut, second, without)


@dataclass(frozen=True)
class Vote:
    """`until=csd.Vote()`: stop once the remaining samples cannot change the majority.

    The answer is then the one that all samples would have given. With `confidence`, stop earlier,
    once the leading answer is the model's more likely answer with this probability, by the Beta
    test of Adaptive-Consistency (Aggarwal et al. 2023, 2305.11860): with a and b votes of the first
    two answers and a flat prior, P(p > 1/2) for p ~ Beta(a + 1, b + 1).

    Samples are counted in the order of their indices, each only after all samples before it have
    finished, so the decision is the same for every draft, budget and batch.
    """

    needs_text: ClassVar[bool] = True

    extract: str | Callable[[str], str | None] = answer_of
    confidence: float | None = None
    limited: bool = False  # True if samples that were cut at max_new_tokens vote

    def __post_init__(self) -> None:
        extractor(self.extract)
        if self.confidence is None:
            return
        if not 0.5 < check_number("confidence", self.confidence, -math.inf) < 1:
            raise ValueError(f"confidence must lie in (0.5, 1), got {shown(self.confidence)}")

    def of(self, total: int) -> Callable[[list[Sample]], bool]:
        """The `until` of a prompt with `total` samples."""
        # cached, since each prefix contains the previous one: each text is read once
        read = cache(self._read)
        return lambda prefix: self._decided(prefix, total, read)

    def _read(self, text: str) -> tuple[str, Labels] | None:
        answer = extractor(self.extract)(text)
        return None if answer is None else _compared(self.extract, answer)

    def decided(self, prefix: list[Sample], total: int) -> bool:
        """True if the first samples, `prefix`, decide the vote of `total` samples."""
        return self._decided(prefix, total, self._read)

    def _decided(
        self,
        prefix: list[Sample],
        total: int,
        read: Callable[[str], tuple[str, Labels] | None],
    ) -> bool:
        votes: dict[Key, int] = {}
        distinct = Answers()
        for sample in prefix:
            text = _text_for(self.extract, sample)
            answer = read(text) if counts(sample, self.limited) else None
            if answer is not None:
                key = distinct.key(*answer)
                votes[key] = votes.get(key, 0) + 1
        if not votes:
            return len(prefix) >= total
        order = list(votes)
        leader, second = _leader(votes)
        left = total - len(prefix)
        # an answer that occurred later loses a tie; so does an answer that has not occurred yet
        settled = left <= votes[leader] and all(
            votes[a] + left < votes[leader] + (order.index(leader) < order.index(a))
            for a in order
            if a != leader
        )
        if settled or self.confidence is None:
            return settled
        return _more_likely(votes[leader], second) >= self.confidence

    def least(self, total: int) -> int:
        """Number of the `total` samples that are drawn whatever their answers are.

        The number of drawn samples depends on their answers, which biases an average over them. An
        average over these first samples is not biased.
        """
        least = (total + 1) // 2
        if self.confidence is not None:
            agreeing = next(n for n in range(1, 64) if _more_likely(n, 0) >= self.confidence)
            least = min(least, agreeing)
        return least


def _leader(votes: Mapping[Any, Any]) -> tuple[Any, Any]:
    """The first answer with the most votes, and the votes of the next one."""
    # dicts keep insertion order, and max returns the first of equal values
    best = max(votes, key=lambda answer: votes[answer])
    return best, max((votes[answer] for answer in votes if answer != best), default=0)


def _compared(extract: str | Callable, answer: str) -> tuple[str, Labels]:
    """Value and labels by which answers are compared; of a user's function its result alone."""
    if not _is_own(extract):
        return answer, Labels()
    stated = answer.stated if isinstance(answer, Answer) else answer
    return canonical(answer), labels_of(stated)


def _is_own(extract: str | Callable) -> bool:
    return isinstance(extract, str) or extract in EXTRACTORS.values()


def _text_for(extract: str | Callable, sample: Sample) -> str:
    """The text that an extractor reads: without thoughts, and whole for a user's function."""
    text = text_of(sample)
    if _is_own(extract):
        return after_thoughts(text, sample.in_thought)
    return text


def text_of(sample: Sample) -> str:
    if sample.text is None:
        raise ValueError(f"sample {sample.index} has no text: call generate with tokenizer=")
    return sample.text


def _of(weight: Callable[[Sample], float], sample: Sample) -> float:
    weight_of = weight(sample)
    try:
        value = float(weight_of)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"weight must return a number, got {shown(weight_of)} for sample {sample.index}"
        ) from error
    except OverflowError:
        value = math.inf
    if not 0 <= value < math.inf:
        raise ValueError(
            f"weight must return a finite number of at least 0, got {value} for sample "
            f"{sample.index}"
        )
    return value


def _more_likely(a: int, b: int) -> float:
    """P(p > 1/2) for p ~ Beta(a + 1, b + 1), which is P(Binomial(a + b + 1, 1/2) <= a)."""
    n = a + b + 1
    return sum(math.comb(n, i) for i in range(a + 1)) / 2**n
