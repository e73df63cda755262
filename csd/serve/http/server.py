"""State shared by the handlers of a server's paths."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from csd.engine.options.engine_arguments import ServerOptions
from csd.engine.options.grammar_process import check_compiles
from csd.serve import AsyncEngine
from csd.serve.http.api.calls.forms import check_parser
from csd.serve.http.api.request import CHAT_TOKENS, Asked
from csd.serve.http.api.response import TokenTexts
from csd.serve.http.checks import Limits, check_sizes, grammar_size
from csd.serve.http.clients import Clients, Readers, Shares, parse_body, receive_body, unless_gone
from csd.serve.http.errors import Refused
from csd.serve.http.metrics import snapshot
from csd.serve.http.names import as_fields
from csd.serve.places import Places
from csd.utils.arguments import default_of
from csd.utils.check import shown

T = TypeVar("T")

TOOL_CALL_PARSER: str = default_of(ServerOptions, "tool_call_parser")


class Server:
    """An engine, the model's name, and the access and limits of clients.

    name: the model's name in answers. Requests may have it, the name or path that the engine was
        made with, or none.
    keys: the accepted API keys, of which only the first may use /update_weights; without any, all
        requests are accepted.
    shares: True makes equal prompts of requests without keys one group; those of one key always
        are.
    group_window: milliseconds; see `ServerOptions`.
    weights_folder: the folder within which /update_weights loads folders; None: the path is off.
    hosts, origins: names of the server beside loopback, and origins of pages that may use it.
    tool_call_parser: as in `ServerOptions`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        *,
        keys: tuple[str, ...] = (),
        shares: bool = False,
        group_window: float = 0.0,
        weights_folder: str | None = None,
        hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        limits: Limits | None = None,
        tool_call_parser: str = TOOL_CALL_PARSER,
    ):
        self.tool_call_parser = check_parser("tool_call_parser", tool_call_parser)
        self.engine, self.name, self.weights_folder = engine, name, weights_folder
        self.clients, self.limits = Clients(keys, shares, group_window / 1000), limits or Limits()
        self.hosts, self.origins = hosts, origins
        some = self.limits
        self.readers = Readers(some.readers, some.reader_share, some.read_seconds)
        self._bodies = Shares("bodies", max(some.bodies, some.body))
        self._grammars = Shares("grammars", some.grammars)
        self.created = int(time.time())
        self.responses: dict[int, int] = {}
        self._places = Places(some.requests)  # of requests that are being answered, by client
        self._texts: tuple[Any, TokenTexts] | None = None
        if engine.engine.tokenizer is not None:
            # the first call may change a tokenizer's settings, which several threads cannot do
            engine.engine.tokenizer("a", add_special_tokens=False)

    @property
    def texts(self) -> TokenTexts:
        """`TokenTexts` of the current tokenizer, which an update of the weights may replace."""
        tokenizer = self.engine.engine.tokenizer
        if self._texts is None or self._texts[0] is not tokenizer:
            self._texts = tokenizer, TokenTexts(tokenizer)
        return self._texts[1]

    def count(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.engine, self.responses, self.open, self.readers.open)

    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "csd",
            "max_model_len": self.engine.longest,
        }

    @property
    def open(self) -> int:
        """Number of requests that are being answered."""
        return self._places.held

    @contextmanager
    def answering(self, client: str) -> Iterator[ExitStack]:
        """Count a request as open within the block, or until the yielded stack is closed elsewhere.

        Raises Refused if too many are open, in all or of the client, or the server is shutting
        down.
        """
        if self.engine.closed:
            raise Refused("the server is shutting down", status=503, code="shutting_down")
        sharing = self.clients.sharing(client)
        if not self._places.allows(sharing):
            full = self._places.full
            raise Refused(
                f"the server is already answering {self.open} requests"
                + ("" if full else ", this client's share of them: wait for earlier ones"),
                status=503 if full else 429,
                code="too_many_requests",
            )
        self._places.take(sharing)
        with ExitStack() as stack:
            stack.callback(self._places.give, sharing)
            yield stack

    async def read(
        self,
        request: Request,
        client: str,
        work: Callable[[dict[str, Any]], T],
        undo: Callable[[T], Any] | None = None,
    ) -> T:
        """Returns `work` of a request's body, called in a thread of the readers.

        undo: called with the result if the client has disconnected. Raises Refused.
        """
        with ExitStack() as held:

            def take(size: int) -> None:
                self._bodies.take(client, size)
                held.callback(self._bodies.give, client, size)

            data = await receive_body(request, self.limits, take)
            reading = self.readers.run(client, len(data), lambda: work(parse_body(data)), undo)
            return await unless_gone(request.receive, reading)

    def submit(
        self,
        body: dict[str, Any],
        read: Callable[[dict[str, Any], Any], Asked],
        owner: str | None,
        client: str,
    ) -> Asked:
        """Read a body and submit its prompts to the engine. Raises as their checks do."""
        self.check_model(body)
        self.check_sizes(body)
        asked = read(body, self.engine.engine.tokenizer)
        self.check_size(asked, body)
        check_compiles(asked.options)
        size = grammar_size(body, self.limits)
        if size:
            self._grammars.take(client, size)
            asked.ends.append(lambda: self._grammars.give(client, size))
        try:
            group = self.clients.group(client) if asked.seedless else None
            asked.submit(self.engine, owner, self.clients.sharing(client), group)
        except BaseException:
            asked.cancel()
            raise
        return asked

    def check_sizes(self, body: dict[str, Any]) -> None:
        """Raises Refused, naming the field, for a value that takes long to read."""
        check_sizes(body, self.limits, self.engine.longest, self.engine.limits().vocab)

    def refused(self, error: BaseException) -> Refused:
        """The answer to an error, without the folders of the model and of its weights."""
        names: set[str] = set()
        for path in filter(None, (self.engine.source, self.weights_folder)):
            # a source may also be the name of a model on the hub
            if os.path.isabs(path) or os.path.exists(path):
                names |= {path, os.path.abspath(path), os.path.realpath(path)}

        def hidden(text: str) -> str:
            for name in sorted(names, key=len, reverse=True):
                if os.sep in name:
                    text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "[folder]", text)
            return text

        # before the rest of a path is taken for one of its own
        refused = Refused.of(error, hidden)
        refused.message = hidden(refused.message)
        return refused

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises Refused if a body names another model."""
        name = body.get("model")
        if name not in (None, "", self.name, self.engine.source):
            raise Refused(
                f"model must be {self.name!r}, the only one served, got {shown(name)}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def check_size(self, asked: Asked, body: dict[str, Any]) -> None:
        """Raises Refused if a request has more choices, or longer ones, than the limits."""
        samples, limit, prompts = asked.samples, self.limits.choices, len(asked.prompts)
        # the engine refuses values of other types
        if isinstance(samples, int) and prompts * samples > limit:
            what = "n" if prompts == 1 else "n times the number of prompts"
            got = shown(samples) if prompts == 1 else f"{shown(samples)} times {prompts}"
            about = f"{what} must be at most {limit} (--max-n of the server), got {got}"
            raise Refused(about, param="n")
        new, context = asked.options.get("max_new_tokens"), self.engine.longest
        self._check_likely(asked)
        if isinstance(new, int) and new > context:
            name = as_fields("max_new_tokens", body)
            about = f"{name} must be at most {context}, the context of the server, got {shown(new)}"
            raise Refused(about, param=name)

    def _check_likely(self, asked: Asked) -> None:
        """Raises Refused if an answer would have too many probabilities of likely tokens."""
        limit, top = self.limits.likely, asked.top or 0
        new, samples = asked.options.get("max_new_tokens", CHAT_TOKENS), asked.samples
        # the engine refuses values of other types
        if not isinstance(samples, int) or not isinstance(new, int):
            return
        # a token of a text has at least a character
        echoed = sum(min(len(p), self.engine.longest) for p in asked.prompts if asked.echo)
        tokens = (len(asked.prompts) * samples * new + echoed) * asked.repeats
        if top * tokens > limit:
            name = "top_logprobs" if asked.chat else "logprobs"
            raise Refused(
                f"{name} times the tokens of all choices must be at most {limit}, got {top} times "
                f"{tokens}: request fewer choices, tokens or log-probabilities at once",
                param=name,
            )
