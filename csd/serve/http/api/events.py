"""A request's choices as server-sent events, while they are drawn.

All tokens since the last event become one event per choice, so a slow reader gets fewer and larger
events, and no reader waits for another.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from csd.serve import Piece, Reader, news
from csd.serve.http.api.response import HttpAnswer
from csd.serve.http.errors import Refused


async def events(answer: HttpAnswer) -> AsyncIterator[bytes]:
    """Yield the events of an answer. Raises the error that ended the request."""
    asked = answer.asked
    head = answer.head | {"object": "chat.completion.chunk" if asked.chat else "text_completion"}
    ended, total = 0, len(asked.handles) * asked.samples

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if asked.include_usage:
            more = {"usage": None} | more
        elif ended == total:
            # sent with the last choice: clients expect an event without choices only on request
            more = {"csd": answer.extras()}
        fingerprint = {"system_fingerprint": asked.handles[0].fingerprint}
        return event_of(head | {"choices": choices} | fingerprint | more)

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
    drawn: dict[int, _Choice] = {}
    async for handle, pieces in news(answer.asked.handles):
        choices = []
        for piece in pieces:
            index = answer.index(handle, piece.index)
            if index not in drawn:
                drawn[index] = _Choice(answer, handle, index)
            choices += drawn[index].push(piece)
        if choices:
            yield choices
    answer.asked.raise_error()


def event_of(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class _Choice:
    """A choice while it is drawn."""

    def __init__(self, answer: HttpAnswer, handle: Reader, index: int):
        self._answer, self._handle, self._index = answer, handle, index
        self._first = True
        self._stream = answer.stream(handle)
        self._offsets = answer.offsets(handle)

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices with its new parts: one for text, and one for the finish reason if it ends."""
        answer, stream, asked = self._answer, self._stream, self._answer.asked
        choices: list[dict[str, Any]] = []
        first, self._first = self._first, False
        if asked.nothing_new:
            piece = Piece(piece.index, sample=piece.sample)
        text = answer.echo(self._handle) + piece.text if asked.echo and first else piece.text
        has_scores = piece.tokens and (asked.top is not None or asked.token_ids)
        if stream is not None:
            deltas = [*stream.push(text, piece.sample is not None)]
            # the first event has the role, and each one with scores is an event
            if first or (has_scores and not deltas):
                deltas.insert(0, {"content": ""} if first else {})
            choices = [self._new({"delta": delta}) for delta in deltas]
        elif text or has_scores or first:
            content = {"content": text} if text or first else {}
            choices = [self._new({"delta": content} if asked.chat else {"text": text})]
        if first and asked.chat:
            choices[0]["delta"] = {"role": "assistant"} | choices[0]["delta"]
        if choices:
            answer.add_scores(choices[0], self._handle, piece, self._offsets, first)
        if piece.sample is not None:
            if piece.sample.finish_reason == "cancelled":
                # an error ends the request's other samples too
                self._handle.raise_error()
                raise Refused("the server is shutting down", status=503, code="shutting_down")
            end = self._new({"delta": {}} if asked.chat else {"text": ""})
            calls = stream is not None and stream.calls > 0
            choices.append(end | answer.end(self._handle, piece.sample, calls))
        return choices

    def _new(self, part: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "logprobs": None, "finish_reason": None} | part
