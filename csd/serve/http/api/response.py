"""Choices, log-probabilities and usage in OpenAI's format."""

import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from csd.engine.options.open_thought import answer_header
from csd.engine.results.result import Sample, Samples
from csd.engine.results.stats import tokens_per_step
from csd.models.text.streamed import TextStream
from csd.models.text.token_bytes import token_bytes
from csd.serve import Piece, Reader
from csd.serve.handle import Top
from csd.serve.http.api.calls.json_text import Call
from csd.serve.http.api.calls.streams import Stream, call_of, merged
from csd.serve.http.api.request import Asked
from csd.serve.http.errors import Refused
from csd.serve.http.json_parts import LEVELS

# log-probability, in JSON, of a token that cannot be drawn, as OpenAI has it
NEVER = -9999.0


class TokenTexts:
    """Texts of tokens: of each as part of a longer text, and of several."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else token_bytes(tokenizer)

    @property
    def header(self) -> str:
        """Text that the chat template writes in front of an answer."""
        return answer_header(self._tokenizer)

    def of(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens. A partial character is U+FFFD; without a tokenizer, `token_id:N`."""
        if self._bytes is None:
            return [f"token_id:{i}" for i in ids]
        return [self._bytes.text(i) for i in ids]

    def raw(self, token: int) -> list[int] | None:
        """Bytes of a token, which may be a part of a character; None if they are not known."""
        if self._bytes is None:
            return [*f"token_id:{token}".encode()]
        data = self._bytes.of(token)
        return None if data is None else [*data]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([*ids], skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, skip_special_tokens, prompt)


class Offsets:
    """Places of a choice's tokens in its text, in front of which the prompt's may be echoed."""

    def __init__(self, answer: "HttpAnswer", handle: Reader):
        self._texts, self._skip = answer.texts, answer.skips
        self._echo = answer.echo(handle) if answer.asked.echo else ""
        self._prompt = handle.prompt_ids
        self._stream = self._texts.stream(self._skip, self._prompt)
        self._start = len(self._echo)

    def of_prompt(self) -> list[int]:
        """Places of the echoed prompt's tokens."""
        stream = self._texts.stream(self._skip)
        places = self._places(stream, self._prompt, 0)
        if stream is None:
            self._start = sum(map(len, self._texts.of(self._prompt)))
            return places
        return [min(offset, self._start) for offset in places]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Places of the choice's next tokens."""
        places = self._places(self._stream, tokens, self._start)
        if self._stream is None:
            self._start += sum(map(len, self._texts.of(tokens)))
        return places

    def _places(self, stream: TextStream | None, tokens: Sequence[int], start: int) -> list[int]:
        places = []
        for token, name in zip(tokens, self._texts.of(tokens), strict=True):
            if stream is None:
                places.append(start)
                start += len(name)
            else:
                # a token that is a part of a character begins where the character does
                places.append(start + len(stream.text))
                stream.push(token)
        return places


class HttpAnswer:
    """Parts common to the whole and the streamed answer to one request.

    refused: returns the answer to an error. levels: of a whole answer, that are written one by one.
    """

    levels = LEVELS

    def __init__(
        self,
        asked: Asked,
        name: str,
        texts: TokenTexts,
        refused: Callable[[BaseException], Refused] = Refused.of,
    ):
        self.asked, self.texts, self.refused = asked, texts, refused
        self._prompts: dict[int, str] = {}  # texts of prompts, each decoded once
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    @property
    def skips(self) -> bool:
        """True if texts are without special tokens."""
        return self.asked.options.get("skip_special_tokens", True)

    def echo(self, handle: Reader) -> str:
        """The text that was sent as the prompt, or the text of the token ids that were."""
        prompt = self.asked.prompts[self.asked.handles.index(handle)]
        if isinstance(prompt, str):
            return prompt
        return self.texts.decode(handle.prompt_ids, self.skips)

    def index(self, handle: Reader, sample: int) -> int:
        """Index of a choice: the prompt's index times n, plus the sample's index in its prompt."""
        number = self.asked.handles.index(handle)
        return number * self.asked.samples + sample - handle.request.samples.start

    def stream(self, handle: Reader) -> Stream | None:
        """The stream of calls and content of one choice; None for a request without tools."""
        if self.asked.tools is None:
            return None
        number = self.asked.handles.index(handle)
        if number not in self._prompts:
            self._prompts[number] = self.texts.decode(handle.prompt_ids)
        return self.asked.tools.stream(self._prompts[number], self.texts.header)

    def whole(self, results: list[Samples]) -> dict[str, Any]:
        """Returns the answer to a request that is not streamed."""
        asked = self.asked
        choices = [
            self._choice(handle, sample)
            for handle, result in zip(asked.handles, results, strict=True)
            for sample in result
        ]
        return self.head | {
            "object": "chat.completion" if asked.chat else "text_completion",
            "choices": choices,
            "usage": self.usage(),
            "system_fingerprint": asked.handles[0].fingerprint,
            "csd": self.extras(),
        }

    def _choice(self, handle: Reader, sample: Sample) -> dict[str, Any]:
        asked, piece = self.asked, Piece(sample.index)
        if not asked.nothing_new:
            scores = sample.logprobs, sample.raw_logprobs, sample.top_logprobs
            piece = Piece(sample.index, sample.text or "", sample.tokens, *scores)
        choice: dict[str, Any] = {"index": self.index(handle, sample.index)}
        text = piece.text
        calls: list[Call] = []
        if asked.chat:
            message: dict[str, Any] = {"content": text}
            if (stream := self.stream(handle)) is not None:
                message, calls = merged(stream.push(text, True))
            choice["message"] = {"role": "assistant", **message, "refusal": None}
            if calls:
                choice["message"]["tool_calls"] = [call_of(call) for call in calls]
        else:
            choice["text"] = self.echo(handle) + text if asked.echo else text
        choice["logprobs"] = None
        self.add_scores(choice, handle, piece, self.offsets(handle))
        return choice | self.end(handle, sample, bool(calls))

    def offsets(self, handle: Reader) -> Offsets | None:
        """Places of the tokens of one choice; None for answers without them."""
        return None if self.asked.chat or self.asked.top is None else Offsets(self, handle)

    def add_scores(
        self,
        choice: dict[str, Any],
        handle: Reader,
        piece: Piece,
        offsets: Offsets | None,
        first: bool = True,
    ) -> None:
        """Add the log-probabilities and ids of a piece's tokens, as far as they are requested.

        first: True for the choice's first piece, which has those of its prompt too.
        """
        asked, scores = self.asked, (piece.tokens, piece.raw_logprobs, piece.top)
        if offsets is not None:
            echoed = handle if asked.echo and first else None
            choice["logprobs"] = self.logprobs(*scores, offsets, echoed)
        elif asked.top is not None:
            choice["logprobs"] = self.chat_logprobs(*scores)
        if asked.top is not None:
            choice["csd"] = {"logprobs": piece.logprobs}
        if asked.token_ids:
            choice["token_ids"] = piece.tokens
            if first and not asked.chat:
                choice["prompt_token_ids"] = handle.prompt_ids

    def end(self, handle: Reader, sample: Sample, calls: bool = False) -> dict[str, Any]:
        """Fields of a choice that state how it ended; `error` if it could not continue.

        calls: True if it calls tools.
        """
        if self.asked.nothing_new:
            return {"finish_reason": "length", "stop_reason": sample.stop_reason}
        reason = sample.finish_reason
        reason = "tool_calls" if calls and reason == "stop" else reason
        fields = {"finish_reason": reason, "stop_reason": sample.stop_reason}
        if sample.error is None:
            return fields
        return fields | self.refused(handle.request.progress.errors[sample.index]).body()

    def chat_logprobs(
        self, tokens: list[int], logprobs: list[float], top: list[Top]
    ) -> dict[str, Any]:
        content = []
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            entry = self._entry(token, logprob)
            pairs = top[i] if i < len(top) else []
            content.append(entry | {"top_logprobs": [self._entry(*pair) for pair in pairs]})
        return {"content": content, "refusal": None}

    def logprobs(
        self,
        tokens: list[int],
        logprobs: list[float],
        top: list[Top],
        offsets: Offsets,
        echoed: Reader | None = None,
    ) -> dict[str, Any]:
        """Log-probabilities of a completion, after its prompt's if `echoed`."""
        places: list[int] = []
        chances: list[float | None] = [*logprobs]
        tops: list[Top | None] = [*top]
        if echoed is not None and echoed.scores is not None:
            places = offsets.of_prompt()
            chances = [None, *echoed.scores.logprobs, *chances]
            tops = [None, *echoed.scores.top, *tops]
        places += offsets.of(tokens)
        if echoed is not None and echoed.scores is not None:
            tokens = echoed.prompt_ids + tokens
        texts, listed = self.texts.of(tokens), None
        if self.asked.top:
            listed = [
                None if likeliest is None else self._by_text(likeliest, text, chance)
                for likeliest, text, chance in zip(tops, texts, chances, strict=True)
            ]
        return {
            "tokens": texts,
            "token_logprobs": [None if x is None else _finite(x) for x in chances],
            "top_logprobs": listed,
            "text_offset": places,
        }

    def _by_text(self, likeliest: Top, text: str, chance: float | None) -> dict[str, float]:
        """Log-probabilities of likeliest and drawn tokens, by text; the larger of equal texts."""
        texts = self.texts.of([token for token, _ in likeliest])
        pairs = [(name, x) for name, (_, x) in zip(texts, likeliest, strict=True)]
        if chance is not None:
            pairs.append((text, chance))
        by_text: dict[str, float] = {}
        for name, x in pairs:
            by_text[name] = max(by_text.get(name, NEVER), _finite(x))
        return by_text

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        (text,) = self.texts.of([token])
        return {"token": text, "logprob": _finite(logprob), "bytes": self.texts.raw(token)}

    def usage(self) -> dict[str, Any]:
        """Token counts of the prompts, each counted once, and of all choices."""
        handles = self.asked.handles
        prompt = sum(len(h.prompt_ids) for h in handles)
        new = sum(len(s.tokens) for h in handles for s in h.request.progress.finished.values())
        new = 0 if self.asked.nothing_new else new
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {
                "cached_tokens": sum(h.request.progress.stats.cached_tokens for h in handles)
            },
        }

    def extras(self) -> dict[str, Any]:
        """Fields that OpenAI's interface does not have."""
        handles = self.asked.handles
        stats = [h.request.progress.stats for h in handles]
        return {
            "seed": handles[0].seed,
            "weights_version": handles[0].weights,
            "tokens_per_step": tokens_per_step(
                sum(s.tokens for s in stats), sum(s.sample_steps for s in stats)
            ),
            "nodes_proposed": sum(s.nodes_proposed for s in stats),
            "accepted": {k: sum(s.accepted[k] for s in stats) for k in stats[0].accepted},
        }


def _finite(x: float) -> float:
    return x if math.isfinite(x) else NEVER
