"""The source of requests of a run that is open while it draws."""

from typing import Any, Protocol

from csd.engine.call import RunSettings
from csd.engine.requests import Request
from csd.engine.scheduler import Scheduler
from csd.engine.step import Step


class Feed(Protocol):
    """Requests that come while an engine runs."""

    def prepare(self, engine: Any, drafter: Any, nodes: int) -> Step:
        """The engine's step, over caches of its sizes; nodes: that a step drafts, if given."""

    def scheduler(
        self, step: Step, requests: list[Request], settings: RunSettings, **options: Any
    ) -> Scheduler:
        """One that takes them in between steps; options: as `Scheduler` has them."""
