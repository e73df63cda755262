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
    key: int  # the group's, never used before
    at: int = 0  # tokens read
    heard: int = 0  # what the drafter has of them, as it counts

    @classmethod
    def begin(cls, engine: "Engine", step: Step, job: Job, group: int) -> "Prefill":
        """Reserve the pages of a group for the job's prompt."""
        job.group = group
        job.pages = step.cache.take(step.cache.prompt_pages, group, len(job.prompt) - 1)
        key = engine.new_group_key()
        # from here on what the drafter keeps of the group is not free for others
        step.slots.group_key[group].fill_(key)
        return cls(engine, step, job, key)

    @property
    def chunk(self) -> int:
        """Tokens of the next chunk, 0 once all are read."""
        return min(self.engine.prefill_chunk, len(self.job.prompt) - 1 - self.at)

    def read(self) -> None:
        """Run the next chunk; keys and values go to the group's pages."""
        tokens = self.job.prompt[self.at : self.at + self.chunk]
        self.step.read_prompt(self.job.group, tokens, self.at)
        self.at += len(tokens)
        self._tell(self.at)

    def end(self) -> None:
        """The group is there for its samples, and for what drafts for them."""
        prompt = self.job.prompt
        self.step.slots.prompt_len[self.job.group].fill_(len(prompt) - 1)
        self._tell(len(prompt))

    def _tell(self, read: int) -> None:
        step = self.step
        if step.drafting:
            drafter = step.drafter
            self.heard = drafter.hear(self.key, self.job.prompt, self.heard, read, step.slots)
