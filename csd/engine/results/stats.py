"""Counts and seconds of a prompt's samples."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from csd.engine.results.record import SOURCES
from csd.utils.phases import KINDS


@dataclass(slots=True)
class Stats:
    """Statistics of one prompt's samples. Seconds are of the whole call, for all of its prompts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, tokens whose keys and values an earlier prompt had computed
    tokens: int = 0
    call_tokens: int = 0  # tokens of all prompts of the call
    steps: int = 0  # steps in which the prompt had a sample in flight
    sample_steps: int = 0  # the same, summed over samples
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
    # "compile" and "measure" occur in a first call, the other phases are sampling
    seconds: dict[str, float] = field(default_factory=dict)
    # most bytes torch allocated on the GPU, since the process began or its user reset the count
    peak_memory: int | None = None
    decoder: str = "fused"  # the decoder that ran: "fused", "module", or "own", the user's
    fused_ruled_out: str | None = None  # the model's property that ruled out the fused decoder

    def __str__(self) -> str:
        """One sentence: tokens, seconds, drafts, and seconds of compiling and measuring."""
        return " ".join(part for part in _sentence(self) if part)

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
        return self.tokens / self.sample_steps if self.sample_steps else 0.0

    def to_dict(self) -> dict:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}


def sampling_seconds(seconds: dict[str, float]) -> float:
    """Sum of the seconds of all phases except compiling and measuring."""
    return sum(value for phase, value in seconds.items() if phase not in KINDS)


def _sentence(stats: Stats) -> Iterator[str]:
    """The parts of `str(stats)`."""
    yield f"{stats.tokens:,} tokens"
    if stats.call_tokens > stats.tokens:
        yield f"of a call that drew {stats.call_tokens:,}"
    if stats.sampling_seconds:
        yield f"in {stats.sampling_seconds:.1f} s of sampling,"
        yield f"{stats.tokens_per_second:.0f} per second"
    yield f"and {stats.tokens_per_step:.2f} per step of a sample;"
    if not stats.nodes_proposed:
        yield "nothing was drafted"
    else:
        by = ", ".join(f"{name} {n:,}" for name, n in stats.accepted.items() if n)
        yield f"{stats.nodes_accepted:,} of {stats.nodes_proposed:,} drafted tokens were accepted"
        yield f"({by})" if by else ""
    before = [
        f"{stats.seconds[kind]:.1f} s to {done}"
        for kind, done in (("compile", "compile or load code"), ("measure", "time steps"))
        if stats.seconds.get(kind, 0.0) >= 0.05
    ]
    if before:
        yield f"after {' and '.join(before)}"
