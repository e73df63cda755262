"""Signatures and docstrings that list the arguments."""

import inspect
import textwrap
from collections.abc import Callable
from typing import TypeVar

from csd.engine.options import options_of

F = TypeVar("F", bound=Callable)


def shows(kind: type) -> Callable[[F], F]:
    """Decorator that lists the arguments in `kind` in a function's signature and docstring."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        listed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        lines = []
        for name, (hint, option) in options_of(kind).items():
            listed.append(inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hint
            ))  # fmt: skip
            text = f"{name}: {option.default!r}. {option.help}."
            lines += textwrap.wrap(text, 92, subsequent_indent="    ")
        function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        arguments = "Keyword arguments, with their defaults:\n\n" + "\n".join(lines)
        doc = inspect.getdoc(function) or ""
        function.__doc__ = doc.replace("{options}", arguments)
        return function

    return decorate
