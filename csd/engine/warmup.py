"""`Engine.warmup`: prepares first calls, with caches, graphs, compiled code and step times."""

import threading
from collections.abc import Callable
from typing import Any

from csd.engine.requests import Request
from csd.engine.slot_filler import clear
from csd.engine.static_step import capture_all
from csd.engine.step import Step
from csd.schema.arguments import check_whole
from csd.state.device import current, stream_of


def prepare_first_call(
    engine: Any, num_samples: int, prompt_tokens: int, max_new_tokens: int
) -> None:
    """Prepare calls of these sizes; the arguments are those of `Engine.warmup`."""
    asked: dict[str, Any] = dict(num_samples=num_samples, seed=0, ignore_eos=True)
    # a prompt of one token would be read by the first step only, without a prefill
    prompt = [0] * check_whole("prompt_tokens", prompt_tokens, 2, engine.config.context - 1)
    call = engine.prepare(prompt, max_new_tokens=max_new_tokens, **asked)
    requests, settings = call.requests, call.settings
    # allocate caches of the requested sizes, which the short call below reuses
    _between_calls(engine, requests, lambda step: None)
    engine.generate(prompt, max_new_tokens=min(2, max_new_tokens), **asked)

    def capture(step: Step) -> None:
        capture_all(engine._step_of_call(step, requests, settings, engine.tokenizer))

    _between_calls(engine, requests, capture)


def _between_calls(engine: Any, requests: list[Request], run: Callable[[Step], None]) -> None:
    """Call `run` with the step over the caches of `requests`, while no other call runs."""
    engine._not_within_a_stream()
    with engine._lock, current(engine.device):
        engine._busy = threading.get_ident()
        stream = stream_of(engine.device)
        if stream is not None and engine._last is not None:
            stream.wait_event(engine._last)
        step = engine._prepare(requests, engine._default_drafter)
        run(step)
        clear(step)
        engine._last = None if stream is None else stream.record_event()
