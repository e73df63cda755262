"""Errors in OpenAI's format."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from csd.serve import Closed, QueueFull
from csd.serve.http.names import as_fields, as_messages, named
from csd.utils.check import shown

# of these statuses; others are errors of the request, from 500 on of the server
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}

# absolute paths in a text: between quotation marks, or of at least two names
_PATHS = re.compile(
    r"""(?<=')/[^'\n]+(?=')|(?<=")/[^"\n]+(?=")|(?<=\bfile://)/[^\s'"]+"""
    r"""|(?<![\w/:.~\])-])(?:/[^\s/'"`,;:()\[\]]+){2,}/?"""
)

# errors that a client's value may raise in any reader, beside those of checks
_OF_VALUES = (TypeError, ValueError, ImportError, ArithmeticError, RecursionError)


def without_paths(message: str, sent: Any = "") -> str:
    """A message without paths of this machine; those in what a client has sent stay.

    Other slashes, as of a JSON pointer, begin with a name that this machine's root does not have.
    """

    def hidden(found: re.Match) -> str:
        path = found[0]
        own = os.path.lexists(f"/{path.split('/')[1]}")
        return "[path]" if own and path not in json.dumps(sent, ensure_ascii=False) else path

    return _PATHS.sub(hidden, message)


class Refused(Exception):
    """Error that a request is answered with. param: the field of the request that it names."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @classmethod
    def of(
        cls, error: BaseException, change: Callable[[str], str] = lambda text: text
    ) -> "Refused":
        """The answer to a client for an error of its request; change: of the error's text."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, QueueFull):
            return cls(str(error), status=429, code="queue_full")
        if isinstance(error, Closed):
            return cls("the server is shutting down", status=503, code="shutting_down")
        # raised by the engine's checks before the first step, or where no token is left
        if isinstance(error, TypeError | ValueError):
            message = without_paths(change(as_fields(str(error))))
            return cls(message, param=named(message))
        message = without_paths(change(f"{type(error).__name__}: {error}"))
        return cls(message, status=500, code="engine_error")

    @classmethod
    def of_fields(cls, error: BaseException, body: Mapping[str, Any], prompt: str) -> "Refused":
        """Convert an error of the engine about a request, in the names of its fields.

        prompt: the field that has the prompt, "prompt" or "messages".
        """
        message = as_fields(str(error), body)
        # the engine checks its options for a prompt without tokens before the prompt is read
        message = message.replace(" of an empty prompt", "")
        if body.get("tools") and not body.get("response_format"):
            # the grammar's schema is that of the tool to call
            message = re.sub(r"^response_format\b", "tools", message)
        if prompt == "messages":
            message = as_messages(message)
        message = without_paths(message, body)
        about = message.startswith(("prompt", "the prompt"))
        return cls(message, param=prompt if about else named(message))

    @classmethod
    @contextmanager
    def reading(cls, body: Mapping[str, Any], prompt: str) -> Iterator[None]:
        """Turn what a value of a body raises while it is read into the answer to its client."""
        try:
            yield
        except RecursionError as error:
            raise cls("the body must not be nested as deeply") from error
        except _OF_VALUES as error:
            raise cls.of_fields(error, body, prompt) from error

    def body(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, other)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 408:
            # the rest of the body is not waited for
            headers["Connection"] = "close"
        return Response(
            json.dumps(self.body()), self.status, headers, media_type="application/json"
        )


def wrong(name: str, expected: str, value: Any, param: str | None = None) -> Refused:
    """Error about a field that has another value than expected; param: by default its name."""
    return Refused(f"{name} must be {expected}, got {shown(value)}", param=param or name)
