"""Counters of an `AsyncEngine`; only one thread at a time writes each number."""

from dataclasses import dataclass, field

from csd.engine.stats import Stats


@dataclass(slots=True)
class Counters:
    """Totals since the start, and current use of slots and pages."""

    steps: int = 0
    sample_steps: int = 0  # summed over the samples of each step
    tokens: int = 0
    prompt_tokens: int = 0  # tokens of prompts that were read
    shared_prompt_tokens: int = 0  # tokens of prompts whose pages another request already had
    shared_samples: int = 0  # samples not drawn, because another request draws them too
    requests: int = 0  # ended requests, including cancelled and failed ones
    cancelled: int = 0
    withdrawn: int = 0  # requests cancelled while in the inbox; not counted in `requests`
    failed: int = 0
    samples: int = 0
    nodes_proposed: int = 0
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Stats().accepted, 0))
    slots: int = 0  # slots that hold a sample
    groups: int = 0
    free_pages: int = 0
    pages: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per sample and step."""
        return self.tokens / self.sample_steps if self.sample_steps else 0.0

    def ended(self, stats: Stats, samples: int, cancelled: bool, failed: bool) -> None:
        """Add an ended request to the totals; samples: number of samples that were finished."""
        self.requests += 1
        self.cancelled += cancelled
        self.failed += failed
        self.samples += samples
        self.nodes_proposed += stats.nodes_proposed
        for source, count in stats.accepted.items():
            self.accepted[source] = self.accepted.get(source, 0) + count
