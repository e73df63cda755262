"""Progress bar of a call, in tokens."""

import time
from collections.abc import Sequence

from tqdm.auto import tqdm

from csd.engine.requests import Request
from csd.engine.result import Sample

# shortest time between two updates of the bar
SECONDS = 0.1


class Progress:
    """Bar of drawn tokens, out of the most that samples can have; appears with the first tokens."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests
        self._most = sum(len(r.samples) * r.params.max_new_tokens for r in requests)
        self._samples = sum(len(r.samples) for r in requests)
        self._ended = 0
        self._shown = 0.0  # time of the last update of the bar
        self._bar: tqdm | None = None

    def show(self, now: bool = False) -> None:
        """Update the bar, at most every `SECONDS` unless `now`.

        Called once per step for each sample with new tokens.
        """
        clock = time.perf_counter()
        if not now and clock - self._shown < SECONDS:
            return
        self._shown = clock
        if self._bar is None:
            self._bar = tqdm(desc="csd: sampling", total=self._most, unit="token", unit_scale=True)
        drawn = sum(r.stats.tokens for r in self._requests)
        steps = sum(r.stats.sample_steps for r in self._requests)
        shown = {"samples": f"{self._ended}/{self._samples}", "tau": f"{drawn / max(steps, 1):.2f}"}
        if any(r.history for r in self._requests):
            from_history = sum(r.stats.accepted["history"] for r in self._requests)
            shown["history"] = f"{from_history / max(drawn, 1):.0%}"
        self._bar.total = self._most
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(drawn - self._bar.n)

    def end_sample(self, request: Request, sample: Sample) -> None:
        """Subtract the tokens that an ended sample did not draw from the bar's total."""
        self._ended += 1
        self._most -= request.params.max_new_tokens - len(sample.tokens)
        self.show(now=True)

    def close(self) -> None:
        """Show the last state, and end the line."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
