"""Source of requests that arrive while a run draws samples."""

from typing import Any, Protocol

from csd.engine.call import RunSettings
from csd.engine.requests import Request
from csd.engine.scheduler import Scheduler
from csd.engine.step import Step


class Feed(Protocol):
    """Protocol of a source of requests that arrive while an engine runs."""

    def prepare(self, engine: Any, drafter: Any, nodes: int) -> Step:
        """Returns the engine's step, over caches of the feed's sizes.

        nodes: drafted tokens per step if the budget is a number, else 0.
        """

    def scheduler(
        self, step: Step, requests: list[Request], settings: RunSettings, **options: Any
    ) -> Scheduler:
        """Returns a scheduler that admits the requests between steps; options: `Scheduler`'s."""
