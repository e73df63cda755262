"""A prompt on its way into the caches, chunk by chunk, so that steps can run in between."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from csd.job import Job
from csd.step import Step

if TYPE_CHECKING:
    from csd.engine import Engine


@dataclass(slots=True)
class Prefill:
    """All but the prompt's last token, which is the first root of its samples.

    Chunks begin at multiples of the engine's `prefill_chunk`, whatever else is read or run between
    two of them, so that a prompt's keys and values are the same in every batch.
    """

    engine: "Engine"
    step: Step
    job: Job
    at: int = 0  # tokens read

    @classmethod
    def begin(cls, engine: "Engine", step: Step, job: Job, group: int) -> "Prefill":
        """Reserve the pages of a group for the job's prompt."""
        job.group = group
        job.pages = step.cache.take(step.cache.prompt_pages, group, len(job.prompt) - 1)
        return cls(engine, step, job)

    @property
    def chunk(self) -> int:
        """Tokens of the next chunk, 0 once all are read."""
        return min(self.engine.prefill_chunk, len(self.job.prompt) - 1 - self.at)

    def read(self) -> None:
        """Run the next chunk; keys and values go to the group's pages."""
        tokens = self.job.prompt[self.at : self.at + self.chunk]
        self.engine.read_prompt(self.step, self.job.group, tokens, self.at)
        self.at += len(tokens)

    def end(self) -> None:
        """The group is there for its samples, and for what drafts for them."""
        step, job = self.step, self.job
        key = self.engine.new_group_key()
        step.slots.prompt_len[job.group] = len(job.prompt) - 1
        step.slots.group_key[job.group] = key
        if step.drafting:
            step.drafter.start(key, job.prompt, step.slots)
