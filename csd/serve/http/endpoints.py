"""Handlers of the server's paths."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from csd.models.text.prompts import parse
from csd.serve.http.access_log import Entry
from csd.serve.http.api.events import events
from csd.serve.http.api.request import Asked, read_chat, read_completion, read_messages
from csd.serve.http.api.response import HttpAnswer
from csd.serve.http.api.responses import ResponseAnswer, response_events
from csd.serve.http.api.responses_body import ChatBody
from csd.serve.http.checks import check_template_names
from csd.serve.http.clients import EventStream, WholeAnswer, results_of, unless_gone
from csd.serve.http.errors import Refused, wrong
from csd.serve.http.json_parts import dumps
from csd.serve.http.metrics import prometheus
from csd.serve.http.server import Server
from csd.serve.inbox import Closed
from csd.utils.arguments import check_ids
from csd.utils.check import one_line, shown
from csd.utils.version import __version__

LOG = logging.getLogger("csd")

PAGE = Path(__file__).with_name("page.html")

Endpoint = Callable[[Server, Request], Awaitable[Response]]
Read = Callable[[dict[str, Any], Any], Asked]
Submit = Callable[[dict[str, Any], Read], Asked]
A = TypeVar("A", bound=HttpAnswer)


def answered(endpoint: Endpoint) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Wrap an endpoint: errors become responses, and responses are counted by status."""

    async def call(request: Request) -> ASGIApp:
        server: Server = request.app.state.server
        entry = Entry(request)
        try:
            response = await endpoint(server, request)
        except ClientDisconnect:
            # no client is left to read it
            response = Response(status_code=499)
        except asyncio.CancelledError:
            if not server.engine.closed:
                raise
            # the process ends while a thread still computes for the request
            response = server.refused(Closed()).response()
        except Exception as error:
            refused = server.refused(error)
            if refused.status == 500:
                path = shown(request.url.path)
                LOG.error("%s %s: %s", request.method, path, one_line(str(error)))
            response = refused.response()
        server.count(response.status_code)
        return entry.of(response)

    return call


def as_json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


async def chat_completions(server: Server, request: Request) -> Response:
    def answer_of(body: dict[str, Any], submit: Submit) -> HttpAnswer:
        read = partial(read_chat, parser=server.tool_call_parser)
        return HttpAnswer(submit(body, read), server.name, server.texts, server.refused)

    return await _complete(server, request, answer_of, events)


async def completions(server: Server, request: Request) -> Response:
    def answer_of(body: dict[str, Any], submit: Submit) -> HttpAnswer:
        return HttpAnswer(submit(body, read_completion), server.name, server.texts, server.refused)

    return await _complete(server, request, answer_of, events)


async def responses(server: Server, request: Request) -> Response:
    def answer_of(body: dict[str, Any], submit: Submit) -> ResponseAnswer:
        with Refused.reading(body, "input"):
            chat = ChatBody(body, server.tool_call_parser)

        def refused(error: BaseException) -> Refused:
            return chat.refusal(server.refused(error))

        try:
            asked = submit(chat.chat, chat.read)
        except Refused as error:
            raise refused(error) from error
        return ResponseAnswer(body, asked, server.name, server.texts, refused)

    return await _complete(server, request, answer_of, response_events)


async def _complete(
    server: Server,
    request: Request,
    answer_of: Callable[[dict[str, Any], Submit], A],
    events_of: Callable[[A], AsyncIterator[bytes]],
) -> Response:
    """Answer a request for texts.

    answer_of: makes the answer to a body, whose prompts its second argument submits. events_of: of
    an answer that is streamed.
    """
    owner, client = server.clients.owner(request), server.clients.client(request)

    def submit(body: dict[str, Any], read: Read) -> Asked:
        with Refused.reading(body, "messages" if "messages" in body else "prompt"):
            return server.submit(body, read, owner, client)

    with server.answering(client) as slot:
        answer = await server.read(
            request, client, lambda body: answer_of(body, submit), lambda some: some.asked.cancel()
        )
        slot.callback(answer.asked.cancel)
        # the request counts as open until its answer has been sent
        if answer.asked.stream:
            end = slot.pop_all().close
            return EventStream(events_of(answer), answer, server.limits.send_seconds, end)
        results = await unless_gone(request.receive, results_of(answer))
        content = await run_in_threadpool(
            lambda: dumps(answer.whole(results), answer.levels).encode()
        )
        return WholeAnswer(content, slot.pop_all().close)


async def models(server: Server, request: Request) -> Response:
    server.clients.owner(request)
    name = request.path_params.get("name")
    if not name:
        return as_json({"object": "list", "data": [server.card()]})
    server.check_model({"model": name})
    return as_json(server.card())


async def version(server: Server, request: Request) -> Response:
    return as_json({"version": __version__})


async def health(server: Server, request: Request) -> Response:
    if server.engine.closed:
        raise Refused("the server is shutting down", status=503, code="shutting_down")
    return as_json({"status": "ok", "answering": server.open, "reading": server.readers.open})


async def metrics(server: Server, request: Request) -> Response:
    server.clients.owner(request)
    text = prometheus(server.snapshot(), server.engine.counters)
    return Response(text, media_type="text/plain; version=0.0.4")


async def stats(server: Server, request: Request) -> Response:
    server.clients.owner(request)
    return as_json(server.snapshot())


async def page(server: Server, request: Request) -> Response:
    return HTMLResponse(PAGE.read_text())


async def tokenize(server: Server, request: Request) -> Response:
    """Token ids of a `prompt`, or of `messages` rendered by the chat template."""
    server.clients.owner(request)
    tokenizer, limits = _tokenizer(server), server.engine.limits()

    def read(body: dict[str, Any]) -> dict[str, Any]:
        with Refused.reading(body, "messages" if "messages" in body else "prompt"):
            server.check_sizes(body)
            ids = _ids_of(body, tokenizer, limits)
            more = {"token_strs": server.texts.of(ids)} if body.get("return_token_strs") else {}
            return {"tokens": ids, "count": len(ids), "max_model_len": limits.context} | more

    return await _read(server, request, read)


def _ids_of(body: dict[str, Any], tokenizer: Any, limits: Any) -> list[int]:
    special = body.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise wrong("add_special_tokens", "true or false", special)
    if "messages" in body:
        options = body.get("chat_template_kwargs") or {}
        if isinstance(options, dict):
            check_template_names(options, tokenizer)
        messages = read_messages(body["messages"])
        return parse(messages, tokenizer, limits.vocab, None, options, limits.context)[0][0]
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise wrong("prompt", "a string", prompt)
    if not prompt:
        return []
    ids = parse(prompt, tokenizer, limits.vocab, context=limits.context)[0][0]
    return ids if special else tokenizer(prompt, add_special_tokens=False)["input_ids"]


async def detokenize(server: Server, request: Request) -> Response:
    """Text of the token ids in `tokens`."""
    server.clients.owner(request)
    _tokenizer(server)
    vocab, limit = server.engine.limits().vocab, server.limits.ids

    def read(body: dict[str, Any]) -> dict[str, Any]:
        with Refused.reading(body, "tokens"):
            ids = check_ids("tokens", body.get("tokens"), limit, vocab)
            return {"prompt": server.texts.decode(ids)}

    return await _read(server, request, read)


async def _read(
    server: Server, request: Request, read: Callable[[dict[str, Any]], dict[str, Any]]
) -> Response:
    client = server.clients.client(request)
    with server.answering(client):
        return as_json(await server.read(request, client, read))


async def tokenizer_info(server: Server, request: Request) -> Response:
    """Special tokens and chat template, for clients that render messages themselves."""
    server.clients.owner(request)
    tokenizer = _tokenizer(server)
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    return as_json({name: getattr(tokenizer, name, None) for name in names})


def _tokenizer(server: Server) -> Any:
    tokenizer = server.engine.engine.tokenizer
    if tokenizer is None:
        raise Refused("the model has no tokenizer", status=404)
    return tokenizer


async def update_weights(server: Server, request: Request) -> Response:
    """Load the weights of a folder within `--weights-folder`."""
    if server.weights_folder is None:
        raise Refused("the server was started without --weights-folder", status=404)
    server.clients.administrator(request)
    body = await server.read(request, server.clients.client(request), dict)
    name = body.get("path")
    if not isinstance(name, str) or not name or "\0" in name:
        raise wrong("path", "the name of a folder", name)
    root = os.path.realpath(server.weights_folder)
    folder = os.path.realpath(os.path.join(root, name))
    # a symbolic link may lead out of the folder
    if os.path.commonpath([root, folder]) != root or not os.path.isdir(folder):
        raise wrong("path", "a folder within --weights-folder", name)
    version = await run_in_threadpool(server.engine.update_weights, folder)
    return as_json({"weights_version": version, "system_fingerprint": server.engine.fingerprint})


async def not_found(request: Request, error: Exception) -> Any:
    await asyncio.sleep(0)
    status = getattr(error, "status_code", 404)
    what = "has no such path" if status == 404 else "does not allow this method for the path"
    refused = Refused(f"the server {what}: {request.method} {request.url.path}", status=status)
    return Entry(request).of(refused.response())
