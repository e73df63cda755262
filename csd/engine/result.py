"""Results of `csd.generate`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from csd.engine.draft_trees import Draft
from csd.engine.result_schema import SCHEMA


@dataclass(slots=True)
class Sample:
    """One sample of a prompt."""

    index: int
    text: str | None  # cut before what ended it, unless `include_stop`; None without a tokenizer
    tokens: list[int]  # with the end token, and the token that completes a stop string
    logprobs: list[float]  # of the processed distribution; the model's own at temperature 0
    raw_logprobs: list[float]  # of the model at temperature 1
    finish_reason: str  # "stop", "length" or "cancelled"
    stop_reason: str | int | None = None  # the stop string or end token that ended it
    sources: list[str] = field(repr=False, default_factory=list)  # who drafted each token, or ""
    steps: list[int] = field(repr=False, default_factory=list)  # of the call, that committed each
    drafts: list[Draft] = field(repr=False, default_factory=list)  # with drafts=True
    # with max_thinking_tokens: whether the spent budget left no choice at a token
    forced: list[bool] = field(repr=False, default_factory=list)
    # with top_logprobs: of each token's place, pairs of a token id and its raw log-probability
    top_logprobs: list[list[tuple[int, float]]] = field(repr=False, default_factory=list)
    entropies: list[float] = field(repr=False, default_factory=list)  # with entropy=True, in nats


@dataclass(slots=True)
class Stats:
    """Statistics of one prompt's samples. Seconds are those of the whole call."""

    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0  # steps in which the prompt had a sample in flight
    sample_steps: int = 0  # the same, summed over samples
    nodes_proposed: int = 0  # drafted tokens that were verified
    nodes_accepted: int = 0
    accepted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("own", "sibling", "prompt", "history", "model"), 0)
    )
    history_tokens: int = 0  # of past samples that drafts came from
    shared_tokens: int = 0  # of the call's other prompts that drafts came from
    thoughts_cut: int = 0  # samples whose thought max_thinking_tokens ended
    history_left_out: int = 0  # of past samples for which the graph had no room
    contexts_dropped: int = 0  # of the whole call, for which the graph had no room
    seconds: dict[str, float] = field(default_factory=dict)
    # bytes torch had on the GPU at most, since the process began or its user reset the count
    peak_memory: int | None = None
    decoder: str = "fused"  # which ran: "fused", "module", or one of the user's "own"
    fused_ruled_out: str | None = None  # the property of the model that did

    @property
    def tokens_per_step(self) -> float:
        """tau: tokens committed per sample and step; 1 without speculation."""
        return self.tokens / self.sample_steps if self.sample_steps else 0.0

    def to_dict(self) -> dict:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}


@dataclass(slots=True)
class Samples:
    """The samples of one prompt, in the order of their indices."""

    samples: list[Sample]
    seed: int
    prompt_ids: list[int] = field(repr=False)
    stats: Stats
    error: str | None = None  # with on_error="return": why it could not be served
    # with prompt_logprobs=True: of each token of the prompt, None of the first
    prompt_logprobs: list[float | None] | None = field(repr=False, default=None)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    @property
    def texts(self) -> list[str | None]:
        return [s.text for s in self.samples]

    @property
    def tokens(self) -> list[list[int]]:
        return [s.tokens for s in self.samples]

    @property
    def logprobs(self) -> list[list[float]]:
        return [s.logprobs for s in self.samples]

    @property
    def raw_logprobs(self) -> list[list[float]]:
        return [s.raw_logprobs for s in self.samples]

    @property
    def finish_reasons(self) -> list[str]:
        return [s.finish_reason for s in self.samples]

    @staticmethod
    def json_schema() -> dict:
        """The JSON schema of `to_dict`, with a description of each key."""
        return SCHEMA

    def to_dict(self) -> dict:
        """The object that `json_schema` describes."""
        return {
            "texts": self.texts,
            "indices": [s.index for s in self.samples],
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "raw_logprobs": self.raw_logprobs,
            "finish_reasons": self.finish_reasons,
            "stop_reasons": [s.stop_reason for s in self.samples],
            "error": self.error,
            "sources": [s.sources for s in self.samples],
            "steps": [s.steps for s in self.samples],
            "forced": [s.forced for s in self.samples],
            "top_logprobs": [s.top_logprobs for s in self.samples],
            "entropies": [s.entropies for s in self.samples],
            "prompt_logprobs": self.prompt_logprobs,
            "seed": self.seed,
            "prompt_ids": self.prompt_ids,
            "stats": self.stats.to_dict(),
        }


def to_json(out: Samples, tokenizer: Any, model: str, drafts: bool) -> dict:
    """The object that `csd sample --json` prints: `out`, and the text of every token id in it.

    With drafts, also each sample's list of `Draft`.
    """
    result = out.to_dict() | {"model": model}
    ids = {*out.prompt_ids, *(t for tokens in out.tokens for t in tokens)}
    if drafts:
        result["drafts"] = [[asdict(d) for d in s.drafts] for s in out]
        ids.update(t for s in out for d in s.drafts for t in d.tokens)
    if tokenizer is not None:
        texts = result["pieces"] = pieces(tokenizer, sorted(ids))
        result["prompt"] = tokenizer.decode(out.prompt_ids)
        result["characters"] = [characters(tokenizer, tokens, texts) for tokens in out.tokens]
    return result


def pieces(tokenizer: Any, ids: list[int]) -> dict[int, str]:
    """The text of each token id within a text; half a character is U+FFFD."""
    # some tokenizers drop the space a text starts with, so each is decoded after another
    before = tokenizer.decode(ids[:1])
    found = {}
    for i in ids:
        both = tokenizer.decode([ids[0], i])
        found[i] = both.removeprefix(before) if both.startswith(before) else tokenizer.decode([i])
    return found


def characters(tokenizer: Any, tokens: list[int], pieces: dict[int, str]) -> dict[int, str]:
    """Texts of tokens that are parts of a character, by place: all of it at the last one."""
    found: dict[int, str] = {}
    held: list[int] = []
    for i, token in enumerate(tokens):
        held = [*held, i] if "\ufffd" in pieces[token] else []
        text = tokenizer.decode([tokens[j] for j in held]) if held else "\ufffd"
        if "\ufffd" not in text:
            found |= dict.fromkeys(held, "") | {i: text}
            held = []
    return found
