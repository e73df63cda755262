"""Counters of an `AsyncEngine`; each number is written by one thread at a time."""

from dataclasses import dataclass, field

from csd.engine.stats import Stats


@dataclass(slots=True)
class Counters:
    """Totals since the start, and what is in flight now."""

    steps: int = 0
    sample_steps: int = 0  # summed over the samples of each step
    tokens: int = 0
    prompt_tokens: int = 0  # of prompts that were read
    shared_prompt_tokens: int = 0  # of prompts that were not, because they were there
    shared_samples: int = 0  # that were not drawn, because another request asks for them too
    requests: int = 0  # that have ended, those below included
    cancelled: int = 0
    withdrawn: int = 0  # that were cancelled before the engine had taken them; not in `requests`
    failed: int = 0
    samples: int = 0
    nodes_proposed: int = 0
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Stats().accepted, 0))
    slots: int = 0  # that hold a sample
    groups: int = 0
    free_pages: int = 0
    pages: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a sample and step."""
        return self.tokens / self.sample_steps if self.sample_steps else 0.0

    def ended(self, stats: Stats, samples: int, cancelled: bool, failed: bool) -> None:
        """A request has."""
        self.requests += 1
        self.cancelled += cancelled
        self.failed += failed
        self.samples += samples
        self.nodes_proposed += stats.nodes_proposed
        for source, count in stats.accepted.items():
            self.accepted[source] = self.accepted.get(source, 0) + count
