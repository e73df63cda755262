"""Samples of a call that ends in an error, attached to the error."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from csd.engine.requests.request import Request
from csd.engine.results.result import Samples


class Carrying:
    """Context that sets an attribute `samples` on an error, once a sample has begun.

    Its value is the result of the call: a list with the `Samples` of each request, or if not
    `many`, those of the only request. Unfinished samples are `cancelled`.
    """

    # no @contextmanager: contextlib sets attributes of the error, which its class may forbid
    def __init__(self, requests: Sequence[Request], many: bool = True):
        self._requests, self._many = requests, many

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, GeneratorExit) or not begun(self._requests):
            return
        results = _drawn(self._requests)
        with suppress(Exception):
            object.__setattr__(error, "samples", results if self._many else results[0])


def begun(requests: Sequence[Request]) -> bool:
    """True if any sample has had a slot."""
    return any(request.live or request.finished for request in requests)


def every(acts: Sequence[Callable[[], Any]]) -> None:
    """Call each function in order, whether or not an earlier one has raised."""
    with ExitStack() as stack:
        for act in reversed(acts):
            stack.callback(act)


def _drawn(requests: Sequence[Request]) -> list[Samples]:
    try:
        return [request.result() for request in requests]
    except BaseException:
        # the tokenizer may have caused the error, possibly by a panic: decode no texts
        return [request.result(texts=False) for request in requests]
