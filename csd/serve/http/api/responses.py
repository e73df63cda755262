"""Answers to /v1/responses, whole and as events.

A response has the text of one choice of a chat completion as an item of its `output`, and each call
of a tool as another one.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import count
from typing import Any

from starlette.concurrency import run_in_threadpool

from csd.engine.results.result import Samples
from csd.serve.http.api.events import choices_of
from csd.serve.http.api.response import HttpAnswer
from csd.serve.http.json_parts import LEVELS, dumps

# name of an event, and its fields
Event = tuple[str, dict[str, Any]]

# fields of a body that its answer repeats, and their values where the body has none
REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "user": None,
}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Items:
    """Items of a response's output, from the parts of a choice, and the events of each part.

    Events refer to items that change: each must be written before the next one is requested.
    """

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}  # the one that is being drawn
        self._scores: list[Any] = []  # log-probabilities of tokens whose text is not in an item

    def add(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[Event]:
        """Yield the events of a choice's delta, or of a whole message."""
        self._scores += logprobs["content"] if logprobs is not None else []
        if delta.get("reasoning_content"):
            yield from self._add_text("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield from self._add_text("message", delta["content"])
        for call in delta.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if "id" in call:
                name = call["function"]["name"]
                own = {"call_id": call["id"], "name": name, "arguments": ""}
                yield from self._end_item("completed")
                yield from self._begin("function_call", "fc", **own)
            if arguments:
                self._item["arguments"] += arguments
                yield self._event("function_call_arguments.delta", delta=arguments)

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events of the end. status: of the item that is being drawn."""
        if not self._item and not self.ended:
            yield from self._begin_text("message")
        yield from self._end_item(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._item.get("type") != kind:
            yield from self._end_item("completed")
            yield from self._begin_text(kind)
        part = self._item["content"][0]
        part["text"] += text
        scores: dict[str, Any] = {}
        if kind == "message":
            # those of a thought in front of it too
            part["logprobs"] += self._scores
            scores, self._scores = {"logprobs": self._scores}, []
        yield self._event(f"{part['type']}.delta", content_index=0, delta=text, **scores)

    def _begin_text(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            yield from self._begin(kind, "msg", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            yield from self._begin(kind, "rs", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
        yield self._event("content_part.added", content_index=0, part=part)
        self._item["content"].append(part)

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        self._item = {"id": _id(prefix), "type": kind, "status": "in_progress", **fields}
        yield "output_item.added", {"output_index": len(self.ended), "item": self._item}

    def _end_item(self, status: str) -> Iterator[Event]:
        item = self._item
        if not item:
            return
        if "content" in item:
            (part,) = item["content"]
            if item["type"] == "message":
                part["logprobs"] += self._scores
                self._scores = []
            end = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._event(f"{part['type']}.done", content_index=0, **end)
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            end = {key: item[key] for key in ("name", "arguments")}
            yield self._event("function_call_arguments.done", **end)
        item["status"] = status
        yield "output_item.done", {"output_index": len(self.ended), "item": item}
        self.ended.append(item)
        self._item = {}

    def _event(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self._item["id"], "output_index": len(self.ended), **fields}


class ResponseAnswer(HttpAnswer):
    """The answer to a request of /v1/responses. body: of the request."""

    levels = LEVELS + 2  # an item and a part of it

    def __init__(self, body: Mapping[str, Any], *args: Any):
        super().__init__(*args)
        self.body, self.id = body, _id("resp")

    def whole(self, results: list[Samples]) -> dict[str, Any]:
        (choice,) = super().whole(results)["choices"]
        items, status = Items(), status_of(choice["finish_reason"])
        for _ in (*items.add(choice["message"], choice["logprobs"]), *items.end(status)):
            pass
        return self.response(items, status)

    def response(self, items: Items, status: str = "in_progress") -> dict[str, Any]:
        """The response with the items that have ended."""
        complete, begun = status == "completed", status == "in_progress"
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if complete else None,
            "status": status,
            "error": None,
            "incomplete_details": None if complete or begun else {"reason": "max_output_tokens"},
            "model": self.head["model"],
            "output": items.ended,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if begun else self._usage(),
            "system_fingerprint": self.asked.handles[0].fingerprint or None,
        }
        for name, default in REPEATED.items():
            value = self.body.get(name)
            response[name] = default if value is None else value
        return response | ({} if begun else {"csd": self.extras()})

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            # their tokens are not counted apart
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def status_of(reason: str) -> str:
    """Status of a response, by the finish reason of its choice."""
    return "incomplete" if reason == "length" else "completed"


async def response_events(answer: ResponseAnswer) -> AsyncIterator[bytes]:
    """Yield the events of an answer; an error that ends the request is the last one."""
    items, serial = Items(), count()

    def written(kind: str, fields: Mapping[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": next(serial), **fields}
        return f"event: {kind}\ndata: {dumps(event, answer.levels + 1)}\n\n".encode()

    def end(status: str) -> bytes:
        parts = [written(f"response.{kind}", fields) for kind, fields in items.end(status)]
        last = {"response": answer.response(items, status)}
        return b"".join(parts) + written(f"response.{status}", last)

    begun = {"response": answer.response(items)}
    yield written("response.created", begun) + written("response.in_progress", begun)
    reason = ""
    try:
        async for choices in choices_of(answer):
            parts = [
                written(f"response.{kind}", fields)
                for choice in choices
                for kind, fields in items.add(choice["delta"], choice["logprobs"])
            ]
            reason = choices[-1]["finish_reason"]
            yield b"".join(parts)
        # all log-probabilities once more
        yield await run_in_threadpool(end, status_of(reason))
    except Exception as error:
        body = answer.refused(error).body()
        fields = {key: body["error"][key] for key in ("code", "message", "param")}
        yield written("error", fields | body)
