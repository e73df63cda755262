"""Samples of a call that ends in an error: the error carries them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from csd.engine.requests import Request
from csd.engine.result import Samples


class Carrying:
    """An error within the block gets an attribute `samples` once a sample has been begun.

    It is what the call would have returned: a list with the `Samples` of each request, or where not
    `many`, those of the only one. Samples that had not finished are `cancelled`.
    """

    # no generator: contextlib sets attributes of the error, which its class may not allow
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
    """Call each one, in order, whether or not one before it has raised."""
    with ExitStack() as stack:
        for act in reversed(acts):
            stack.callback(act)


def _drawn(requests: Sequence[Request]) -> list[Samples]:
    try:
        return [request.result() for request in requests]
    except BaseException:
        # the error may be the tokenizer's own, which may be a panic
        return [request.result(texts=False) for request in requests]
