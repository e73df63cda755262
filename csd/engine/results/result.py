"""Results of `csd.generate`."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from math import inf
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from csd.engine.results import views
from csd.engine.results.record import Draft
from csd.engine.results.stats import Stats
from csd.models.text.token_bytes import token_bytes

if TYPE_CHECKING:
    from pandas import DataFrame


# finish reasons of samples that are not drawn to their ends
UNFINISHED = ("cancelled", "error")


@dataclass(slots=True, repr=False)
class Sample:
    """One sample of a prompt."""

    index: int
    text: str | None  # without what ended it, unless `include_stop`; None without a tokenizer
    tokens: list[int]  # with the end token, and the token that completes a stop string
    logprobs: list[float]  # by the processed distribution; the model's own if greedy
    raw_logprobs: list[float]  # by the model's own distribution
    finish_reason: str  # "stop", "length", "cancelled" or "error"
    stop_reason: str | int | None = None  # the stop string or end token that ended it
    sources: list[str] = field(default_factory=list)  # source of each token's draft, or ""
    steps: list[int] = field(default_factory=list)  # step of the call that committed each token
    drafts: list[Draft] = field(default_factory=list)  # with drafts=True
    # with max_thinking_tokens: True for each token that the exhausted budget forced
    forced: list[bool] = field(default_factory=list)
    # with top_logprobs: per token position, pairs of a token id and its raw log-probability
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)  # with entropy=True, in nats
    in_thought: bool = False  # True if the text begins in a thought, which the prompt leaves open
    error: str | None = None  # why the sample could not continue, or its prompt was not served

    def __repr__(self) -> str:
        return f"Sample({views.line(self)})"


def _in_json(logprobs: list) -> list:
    """Log-probabilities for JSON: null in place of -inf, which JSON numbers cannot express."""
    return [None if x == -inf else x for x in logprobs] if -inf in logprobs else logprobs


def _pairs_in_json(pairs: list[tuple[int, float]]) -> list[tuple[int, float | None]]:
    return [(token, None if x == -inf else x) for token, x in pairs]


@dataclass(slots=True, repr=False)
class Samples:
    """The samples of one prompt, in the order of their indices.

    Prints as one line per sample; a notebook shows the texts, coloured by the source of each draft.
    """

    samples: list[Sample]
    seed: int
    prompt_ids: list[int]
    stats: Stats
    # with on_error="return": why the prompt was not served, else the first error of its samples
    error: str | None = None
    # with prompt_logprobs=True: one per token of the prompt, None for the first
    prompt_logprobs: list[float | None] | None = None
    # tokenizer that decoded the texts; it is not copied or pickled with the samples
    tokenizer: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        return views.lines(self)

    def _repr_html_(self) -> str:
        return views.page_part(self)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        return None, state | {"tokenizer": None}

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

    def report(self, path: str | PathLike[str]) -> None:
        """Write a page about the run, like `csd report`; with `drafts=True` it has the graph.

        Raises ValueError without a tokenizer, OSError where `path` cannot be written.
        """
        views.write_report(self, path)

    def to_pandas(self) -> "DataFrame":
        """DataFrame with one row per sample: index, text, tokens (their number), finish_reason,
        stop_reason, logprob (sum over the tokens) and drafted (share of tokens that were drafted).

        Raises ImportError without pandas.
        """
        return views.frame(self)

    def to_dict(self) -> dict:
        """The result as a dict for JSON; docs/generate.md describes its keys."""
        return {
            "texts": self.texts,
            "indices": [s.index for s in self.samples],
            "tokens": self.tokens,
            "logprobs": [*map(_in_json, self.logprobs)],
            "raw_logprobs": [*map(_in_json, self.raw_logprobs)],
            "finish_reasons": self.finish_reasons,
            "stop_reasons": [s.stop_reason for s in self.samples],
            "error": self.error,
            "errors": [s.error for s in self.samples],
            "sources": [s.sources for s in self.samples],
            "steps": [s.steps for s in self.samples],
            "forced": [s.forced for s in self.samples],
            "in_thought": any(s.in_thought for s in self.samples),
            "top_logprobs": [[*map(_pairs_in_json, s.top_logprobs)] for s in self.samples],
            "entropies": [s.entropies for s in self.samples],
            "prompt_logprobs": self.prompt_logprobs and _in_json(self.prompt_logprobs),
            "seed": self.seed,
            "prompt_ids": self.prompt_ids,
            "stats": self.stats.to_dict(),
        }


def to_json(out: Samples, tokenizer: Any, model: str, drafts: bool) -> dict:
    """The object that `csd sample --json` prints: `out`, and the text of every token id in it.

    drafts: also include each sample's list of `Draft`.
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
    """Text of each token id inside a longer text; U+FFFD for a part of a character."""
    of = token_bytes(tokenizer)
    return {i: of.text(i) for i in ids}


def characters(tokenizer: Any, tokens: list[int], pieces: dict[int, str]) -> dict[int, str]:
    """Texts, by position, of tokens that are parts of a character: the last part gets all of it."""
    texts: dict[int, str] = {}
    held: list[int] = []
    for i, token in enumerate(tokens):
        held = [*held, i] if "\ufffd" in pieces[token] else []
        text = tokenizer.decode([tokens[j] for j in held]) if held else "\ufffd"
        if "\ufffd" not in text:
            texts |= dict.fromkeys(held, "") | {i: text}
            held = []
    return texts


# True if the first samples of a prompt, the argument, are enough
Until = Callable[[list[Sample]], bool]


@runtime_checkable
class UntilRule(Protocol):
    """A rule that makes an `Until` for the number of samples of a prompt, as `csd.Vote` does."""

    @property
    def needs_text(self) -> bool:
        """True if the rule reads the samples' texts."""

    def of(self, total: int) -> Until:
        """The `until` of a prompt with `total` samples."""


# called once per step with (prompt index, sample index, new tokens, their text)
OnText = Callable[[int, int, list[int], str], Any]
