"""Counts and seconds of a prompt's samples."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from csd.engine.results.record import SOURCES
from csd.models.fused.held import held_weights
from csd.utils.phases import KINDS

# least gain that is called one: smaller ones are within the error of a step's estimate
PAYS = 1.05
# most samples, and most tokens of each, whose n-grams are compared
COMPARED, BEGINNING = 64, 2048


@dataclass(slots=True)
class Stats:
    """Statistics of one prompt's samples. Seconds are of the whole call, for all of its prompts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, tokens whose keys and values an earlier prompt had computed
    tokens: int = 0
    call_tokens: int = 0  # tokens of all prompts of the call
    steps: int = 0  # steps in which the prompt had a sample in flight
    sample_steps: int = 0  # the same, summed over samples
    # rows of the model in its steps; fewer than samples and drafted tokens if samples shared them
    rows: int = 0
    nodes_proposed: int = 0  # drafted tokens that were verified
    nodes_accepted: int = 0
    accepted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((s for s in SOURCES if s), 0)
    )
    history_tokens: int = 0  # tokens of past samples that drafts came from
    prior_tokens: int = 0  # tokens that the prior had learnt when the call began
    thoughts_cut: int = 0  # samples whose thought max_thinking_tokens ended
    history_left_out: int = 0  # tokens of past samples that did not fit in the graph
    contexts_dropped: int = 0  # contexts of the whole call that did not fit in the graph
    # gain over the whole call, with an automatic budget: seconds without drafts, by the times of
    # measured steps, divided by the seconds with them (`csd/engine/step/budget/auto.py`)
    draft_gain: float | None = None
    slots: int = 0  # most samples of the call in one step
    # time of a step of twice as many rows, divided by that of a step of as many rows
    double_cost: float | None = None
    # if drafts did not pay: share of the samples' 8-grams that other samples have too
    shared_ngrams: float | None = None
    # "compile" and "measure" occur in a first call, the other phases are sampling
    seconds: dict[str, float] = field(default_factory=dict)
    # most bytes torch allocated on the GPU, since the process began or its user reset the count
    peak_memory: int | None = None
    decoder: str = "fused"  # the decoder that ran: "fused", "module", or "own", the user's
    # types of the fused decoder's matrices, and their bytes that a step reads; else None
    weights: str | None = None
    fused_ruled_out: str | None = None  # the model's property that ruled out the fused decoder

    def name_decoder(self, decoder: Any) -> None:
        """Set the decoder that runs, how it holds its weights, and what ruled out the fused one."""
        self.decoder = getattr(decoder, "name", "own")
        self.fused_ruled_out = getattr(decoder, "why", None)
        held = held_weights(decoder)
        self.weights = None if held is None else str(held)

    def __str__(self) -> str:
        """Lines of tokens, seconds, rows, drafts, weights, seconds of compiling and measuring, and
        whether drafts paid."""
        return "\n".join(line for line in (*_lines(self), _before(self), self.drafts) if line)

    @property
    def drafts(self) -> str:
        """Gain of the call's drafts, or why they did not pay; empty if that is unknown."""
        if self.draft_gain is None:
            return ""
        if self.pays:
            return f"drafts: {self.draft_gain:.2f} x plain"
        what = "do not pay" if self.draft_gain < 1 else "bring little"
        gain = f"drafts {what} here ({self.draft_gain:.2f} x plain)"
        return ": ".join([gain, ", and ".join(_reasons(self))]).removesuffix(": ")

    def explain_drafts(
        self,
        gain: float | None,
        slots: int,
        double_cost: float | None,
        samples: Iterable[Sequence[int]],
    ) -> None:
        """Set the gain of a call's drafts and, if they did not pay, the reasons.

        gain, slots, double_cost: the fields of these names. samples: tokens of finished samples.
        """
        self.draft_gain, self.slots, self.double_cost = gain, slots, double_cost
        if gain is not None and not self.pays:
            texts = [tokens[:BEGINNING] for tokens in islice(samples, COMPARED)]
            self.shared_ngrams = shared_ngrams(texts) if len(texts) > 1 else None

    @property
    def pays(self) -> bool:
        """True if drafts are known to have saved time."""
        return self.draft_gain is not None and self.draft_gain >= PAYS

    @property
    def sampling_seconds(self) -> float:
        """Seconds of the whole call without compiling and measuring."""
        return sampling_seconds(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """The call's tokens divided by its seconds of sampling; 0 without any."""
        tokens = max(self.call_tokens, self.tokens)
        return tokens / self.sampling_seconds if self.sampling_seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """tau: tokens committed per sample and step; 1 without speculation."""
        return tokens_per_step(self.tokens, self.sample_steps)

    def to_dict(self) -> dict:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}


def tokens_per_step(tokens: int, sample_steps: int) -> float:
    """tau: tokens per step of a sample; 0 without steps."""
    return tokens / sample_steps if sample_steps else 0.0


def sampling_seconds(seconds: dict[str, float]) -> float:
    """Sum of the seconds of all phases except compiling and measuring."""
    return sum(value for phase, value in seconds.items() if phase not in KINDS)


def _reasons(stats: Stats) -> Iterator[str]:
    """Reasons for which drafts do not pay, by a call's statistics."""
    if stats.double_cost is not None:
        yield (
            f"a step that checks a draft for each of {stats.slots} samples takes "
            f"{stats.double_cost:.1f} times as long as one without"
        )
    if stats.shared_ngrams is not None:
        yield f"{stats.shared_ngrams:.0%} of the samples' runs of 8 tokens stand in another sample"


def shared_ngrams(texts: Iterable[Sequence[int]], n: int = 8) -> float | None:
    """Share of the texts' n-grams that stand in another text; None without n-grams."""
    each = [Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in texts]
    holders = Counter(gram for grams in each for gram in grams)
    total = sum(sum(grams.values()) for grams in each)
    shared = sum(count for grams in each for gram, count in grams.items() if holders[gram] > 1)
    return shared / total if total else None


def _lines(stats: Stats) -> Iterator[str]:
    """Lines of `str(stats)` on the samples."""
    drawn = f"{stats.tokens:,} tokens"
    if stats.call_tokens > stats.tokens:
        drawn += f" of a call that drew {stats.call_tokens:,}"
    if stats.sampling_seconds:
        drawn += f" in {stats.sampling_seconds:.1f} s of sampling: "
        drawn += f"{stats.tokens_per_second:.0f} per second,"
    yield f"{drawn} {stats.tokens_per_step:.2f} per step of a sample"
    alone = stats.sample_steps + stats.nodes_proposed
    if stats.rows and stats.rows < alone:
        yield f"{stats.rows:,} rows of the model in place of {alone:,}: equal texts share them"
    if not stats.nodes_proposed:
        yield "nothing was drafted"
    else:
        by = ", ".join(f"{name} {n:,}" for name, n in stats.accepted.items() if n)
        drafted = f"{stats.nodes_accepted:,} of {stats.nodes_proposed:,} drafted tokens accepted"
        yield f"{drafted} ({by})" if by else drafted
    if stats.weights is not None:
        yield f"weights in {stats.weights}"


def _before(stats: Stats) -> str:
    """Work that preceded sampling, with its seconds."""
    before = [
        f"{done} took {stats.seconds[kind]:.1f} s"
        for kind, done in (("compile", "compiling or loading code"), ("measure", "timing steps"))
        if stats.seconds.get(kind, 0.0) >= 0.05
    ]
    return f"before that, {' and '.join(before)}" if before else ""
