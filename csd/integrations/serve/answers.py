"""Choices, log-probabilities and usage in OpenAI's format."""

import math
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from csd.engine.result import Sample, Samples
from csd.engine.result_json import pieces
from csd.engine.service import Reader
from csd.engine.service.handle import Top
from csd.integrations.serve.asked import Asked
from csd.integrations.serve.errors import Refused

# log-probability, in JSON, of a token that cannot be drawn, as OpenAI has it
NEVER = -9999.0


class Texts:
    """Text of each token as part of a longer text, decoded on first use and cached."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._lock = threading.Lock()

    def of(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens. A partial character is U+FFFD; without a tokenizer, `token_id:N`."""
        if self._tokenizer is None:
            return [f"token_id:{i}" for i in ids]
        new = sorted({*ids} - self._pieces.keys())
        if new:
            with self._lock:
                self._pieces |= pieces(self._tokenizer, new)
        return [self._pieces[i] for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(list(ids))


class Answer:
    """Parts common to the whole and the streamed answer to one request."""

    def __init__(self, asked: Asked, name: str, texts: Texts):
        self.asked, self.texts = asked, texts
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def index(self, handle: Reader, sample: int) -> int:
        """Index of a choice: the prompt's index times n, plus the sample's index in its prompt."""
        place = self.asked.handles.index(handle)
        return place * self.asked.samples + sample - handle.request.samples.start

    def whole(self, results: list[Samples]) -> dict[str, Any]:
        """Returns the answer to a request that is not streamed."""
        asked = self.asked
        choices = [
            self._choice(handle, sample)
            for handle, result in zip(asked.handles, results, strict=True)
            for sample in result
        ]
        kind = "chat.completion" if asked.chat else "text_completion"
        return self.head | {
            "object": kind,
            "choices": choices,
            "usage": self.usage(),
            "system_fingerprint": asked.handles[0].fingerprint,
            "csd": self.extras(),
        }

    def _choice(self, handle: Reader, sample: Sample) -> dict[str, Any]:
        asked, tokens = self.asked, sample.tokens
        if asked.nothing_new:
            tokens = []
        new = len(tokens)
        choice: dict[str, Any] = {"index": self.index(handle, sample.index)}
        text = "" if sample.text is None or asked.nothing_new else sample.text
        if asked.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = self.texts.decode(handle.prompt_ids) + text if asked.echo else text
        choice["logprobs"] = None
        if asked.top is not None:
            top = sample.top_logprobs
            given = tokens, sample.raw_logprobs[:new], top[:new]
            choice["logprobs"] = (
                self.chat_logprobs(*given)
                if asked.chat
                else self.logprobs(*given, handle if asked.echo else None)
            )
            choice["csd"] = {"logprobs": sample.logprobs[:new]}
        choice |= self.end(handle, sample)
        if asked.token_ids:
            choice["token_ids"] = tokens
            if not asked.chat:
                choice["prompt_token_ids"] = handle.prompt_ids
        return choice

    def end(self, handle: Reader, sample: Sample) -> dict[str, Any]:
        """Fields of a choice that state how it ended; `error` if it could not continue."""
        if self.asked.nothing_new:
            return {"finish_reason": "length", "stop_reason": sample.stop_reason}
        found = {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if sample.error is None:
            return found
        return found | Refused.of(handle.request.errors[sample.index]).body()

    def chat_logprobs(
        self, tokens: list[int], logprobs: list[float], top: list[Top]
    ) -> dict[str, Any]:
        content = []
        for i, (text, logprob) in enumerate(zip(self.texts.of(tokens), logprobs, strict=True)):
            entry = _entry(text, logprob)
            pairs = self._named(top[i]) if i < len(top) else []
            content.append(entry | {"top_logprobs": [_entry(*pair) for pair in pairs]})
        return {"content": content, "refusal": None}

    def logprobs(
        self,
        tokens: list[int],
        logprobs: list[float],
        top: list[Top],
        echoed: Reader | None = None,
        at: int = 0,
    ) -> dict[str, Any]:
        """Log-probabilities of a completion, after its prompt's if `echoed`; at: text offset."""
        chances: list[float | None] = [*logprobs]
        tops: list[Top | None] = [*top]
        if echoed is not None and echoed.scores is not None:
            tokens = echoed.prompt_ids + tokens
            chances = [None, *echoed.scores.logprobs, *chances]
            tops = [None, *echoed.scores.top, *tops]
        texts, offsets = self.texts.of(tokens), []
        for text in texts:
            offsets.append(at)
            at += len(text)
        listed = None
        if self.asked.top:
            listed = [
                None if likeliest is None else self._by_text(likeliest, text, chance)
                for likeliest, text, chance in zip(tops, texts, chances, strict=True)
            ]
        return {
            "tokens": texts,
            "token_logprobs": [None if x is None else _finite(x) for x in chances],
            "top_logprobs": listed,
            "text_offset": offsets,
        }

    def _by_text(self, likeliest: Top, text: str, chance: float | None) -> dict[str, float]:
        """Log-probabilities of likeliest and drawn tokens, by text; the larger of equal texts."""
        pairs = self._named(likeliest)
        if chance is not None:
            pairs.append((text, chance))
        found: dict[str, float] = {}
        for name, x in pairs:
            found[name] = max(found.get(name, NEVER), _finite(x))
        return found

    def _named(self, likeliest: Top) -> list[tuple[str, float]]:
        texts = self.texts.of([token for token, _ in likeliest])
        return [(text, x) for text, (_, x) in zip(texts, likeliest, strict=True)]

    def usage(self) -> dict[str, int]:
        """Token counts of the prompts, each counted once, and of all choices."""
        handles = self.asked.handles
        prompt = sum(len(h.prompt_ids) for h in handles)
        new = 0
        if not self.asked.nothing_new:
            new = sum(len(s.tokens) for h in handles for s in h.request.finished.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        }  # fmt: skip

    def extras(self) -> dict[str, Any]:
        """Fields that OpenAI's interface does not have."""
        handles = self.asked.handles
        stats = [h.request.stats for h in handles]
        steps, tokens = sum(s.sample_steps for s in stats), sum(s.tokens for s in stats)
        return {
            "seed": handles[0].seed,
            "weights_version": handles[0].weights,
            "tokens_per_step": tokens / steps if steps else 0.0,
            "nodes_proposed": sum(s.nodes_proposed for s in stats),
            "accepted": {k: sum(s.accepted[k] for s in stats) for k in stats[0].accepted},
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # the bytes of a partial character cannot be recovered from its text
    raw = None if "\ufffd" in text else [*text.encode()]
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _finite(x: float) -> float:
    return x if math.isfinite(x) else NEVER
