"""What has been drawn when a call ends in an error: the error carries it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from csd.engine.requests import Request
from csd.engine.result import Samples


@contextmanager
def carrying(requests: Sequence[Request], many: bool = True) -> Iterator[None]:
    """An error within gets an attribute `samples` once a sample has been begun.

    It is what the call would have returned: a list with the `Samples` of each request, or where not
    `many`, those of the only one. Samples that had not finished are `cancelled`.
    """
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if begun(requests):
            results = _drawn(requests)
            # an exception may be of a class that lets nobody set an attribute
            with suppress(Exception):
                object.__setattr__(error, "samples", results if many else results[0])
        raise


def begun(requests: Sequence[Request]) -> bool:
    """Whether any sample has had a slot."""
    return any(request.live or request.finished for request in requests)


def every(acts: Sequence[Callable[[], Any]]) -> None:
    """Call each one, in order, whether or not one before it has raised."""
    with ExitStack() as stack:
        for act in reversed(acts):
            stack.callback(act)


def _drawn(requests: Sequence[Request]) -> list[Samples]:
    try:
        return [request.result() for request in requests]
    except Exception:
        # the error may be the tokenizer's own
        return [request.result(texts=False) for request in requests]
