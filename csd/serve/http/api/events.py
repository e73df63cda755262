"""A request's choices as server-sent events, while they are drawn.

All tokens since the last event become one event per choice, so a slow reader gets fewer and larger
events, and no reader waits for another.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from csd.serve import Piece, Reader, news
from csd.serve.http.api.calls.streams import Stream
from csd.serve.http.api.response import HttpAnswer, Offsets
from csd.serve.http.errors import Refused


async def events(answer: HttpAnswer) -> AsyncIterator[bytes]:
    """Yield the events of an answer. Raises the error that ended the request."""
    asked = answer.asked
    head = answer.head | {
        "object": "chat.completion.chunk" if asked.chat else "text_completion",
    }
    ended, total = 0, len(asked.handles) * asked.samples

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if asked.include_usage:
            more = {"usage": None} | more
        elif ended == total:
            # sent with the last choice: clients expect an event without choices only on request
            more = {"csd": answer.extras()}
        fingerprint = {"system_fingerprint": asked.handles[0].fingerprint}
        return data(head | {"choices": choices} | fingerprint | more)

    async for choices in choices_of(answer):
        lines = []
        for choice in choices:
            ended += choice["finish_reason"] is not None
            lines.append(event([choice]))
        yield b"".join(lines)
    if asked.include_usage:
        yield event([], usage=answer.usage(), csd=answer.extras())
    yield b"data: [DONE]\n\n"


async def choices_of(answer: HttpAnswer) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield choices with what is new of them. Raises the error that ended the request."""
    begun: set[int] = set()
    offsets: dict[int, Offsets] = {}
    streams: dict[int, Stream] = {}
    async for handle, pieces in news(answer.asked.handles):
        choices = []
        for piece in pieces:
            index = answer.index(handle, piece.index)
            new = _choices(answer, handle, piece, index not in begun, index, offsets, streams)
            if new:
                begun.add(index)
            choices += new
        if choices:
            yield choices
    answer.asked.raise_error()


def data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_event(error: Refused) -> bytes:
    """The last event of a stream that ends with an error."""
    return data(error.body())


def _choices(
    answer: HttpAnswer,
    handle: Reader,
    piece: Piece,
    first: bool,
    index: int,
    offsets: dict[int, Offsets],
    streams: dict[int, Stream],
) -> list[dict[str, Any]]:
    """Choices of a piece: one for its text, and one for the finish reason if its sample ends."""
    asked, choices = answer.asked, []
    if asked.nothing_new:
        piece = Piece(piece.index, sample=piece.sample)
    text = piece.text
    echoed = asked.echo and first
    if echoed:
        text = answer.echo(handle) + text
    has_scores = piece.tokens and (asked.top is not None or asked.token_ids)
    stream = streams.get(index) or answer.stream(handle)
    if stream is not None:
        streams[index] = stream
        deltas = [*stream.push(text, piece.sample is not None)]
        # the first event has the role, and each one with scores is an event
        if first or (has_scores and not deltas):
            deltas.insert(0, {"content": ""} if first else {})
        choices = [_choice(True, index, "", False) | {"delta": delta} for delta in deltas]
        if first:
            choices[0]["delta"] = {"role": "assistant"} | choices[0]["delta"]
    elif text or has_scores or first:
        choices = [_choice(asked.chat, index, text, first)]
    if choices:
        choice = choices[0]
        if asked.top is not None:
            if index not in offsets:
                offsets[index] = Offsets(answer, handle)
            scores = piece.tokens, piece.raw_logprobs, piece.top
            choice["logprobs"] = (
                answer.chat_logprobs(*scores)
                if asked.chat
                else answer.logprobs(*scores, offsets[index], handle if echoed else None)
            )
            choice["csd"] = {"logprobs": piece.logprobs}
        if asked.token_ids:
            choice["token_ids"] = piece.tokens
            if first and not asked.chat:
                choice["prompt_token_ids"] = handle.prompt_ids
    if piece.sample is not None:
        if piece.sample.finish_reason == "cancelled":
            # an error ends the request's other samples too
            handle.raise_error()
            raise Refused("the server is shutting down", status=503, code="shutting_down")
        end = _choice(asked.chat, index, "", False)
        calls = stream is not None and stream.calls > 0
        choices.append(end | answer.end(handle, piece.sample, calls))
    return choices


def _choice(chat: bool, index: int, text: str, first: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
    if not chat:
        return choice | {"text": text}
    role = {"role": "assistant"} if first else {}
    return choice | {"delta": role | ({"content": text} if text or first else {})}
