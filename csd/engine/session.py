"""Sessions: samples of a prompt that go on in turns, take text from outside, and branch.

    session = engine.session(prompt, num_samples=8, seed=0)
    session.sample(stop="</call>", max_new_tokens=200)      # every live branch draws on
    for branch in session.waiting:                          # those that ended at "</call>"
        branch.append(run_tool(branch.text))                # read once, not sampled
    session.sample(max_new_tokens=200)                      # these, and those that were cut at 200
    best, *_ = session[3].fork(num_samples=4)               # four branches more, from there

A branch is a text: the prompt, tokens that were sampled, and tokens that were appended. A turn is a
call of the engine whose prompts are the texts of the branches, so it reads only what is new
(`csd/state/prefix_cache.py`), and all branches draft for each other in one graph.

Root i has the path (i,), and the j-th branch that was made from one with path p has the path
(*p, j). The tokens of a turn are sampled with the noise of (seed of the path but its end, text so
far) and with the end of the path as the index. So they are a function of the model, the prompt, the
seed, the path and what was appended, whatever else the session does; and the first turn of root i
has the tokens of sample i of `generate` with this seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Unpack

from csd.engine.options import Options
from csd.engine.results.result import Sample, Samples
from csd.utils.arguments import check_whole

# options of a turn that the session itself sets
OWN = ("num_samples", "first_sample", "seed", "history", "record", "until")


def seed_of(seed: int, path: Sequence[int]) -> int:
    """Seed of the branches whose path is `path` and one number more: `seed` for roots."""
    if not path:
        return seed
    text = ",".join(map(str, (seed, *path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one turn of a branch, or tokens that were appended together."""

    tokens: list[int]
    sample: Sample | None = None  # None: appended


@dataclass(eq=False, slots=True)
class Branch:
    """A text of a session."""

    session: "SessionTurns" = field(repr=False)
    path: tuple[int, ...]
    spans: list[Span] = field(default_factory=list, repr=False)  # after the session's prompt
    closed: bool = False
    forks: int = 0  # branches that were made from it

    @property
    def tokens(self) -> list[int]:
        """Tokens after the prompt."""
        return [token for span in self.spans for token in span.tokens]

    @property
    def sampled(self) -> list[bool]:
        """For each of `tokens`, True if it was sampled and False if it was appended."""
        return [span.sample is not None for span in self.spans for _ in span.tokens]

    @property
    def logprobs(self) -> list[float | None]:
        """For each of `tokens`, its log-probability by the processed distribution; None if it was
        appended."""
        logprobs: list[float | None] = []
        for span in self.spans:
            logprobs += [None] * len(span.tokens) if span.sample is None else span.sample.logprobs
        return logprobs

    @property
    def prompt(self) -> list[int]:
        """The whole text so far, the prompt of the next turn."""
        return self.session.prompt + self.tokens

    @property
    def text(self) -> str:
        """Text of `tokens`. Raises ValueError without a tokenizer."""
        return self.session.decode(self.tokens)

    @property
    def stopped_by(self) -> str | int | None:
        """The stop string or the token id that ended the last turn.

        None if it was cut or failed, before the first turn, and once something is appended.
        """
        last = self.spans[-1].sample if self.spans else None
        return None if last is None else last.stop_reason

    @property
    def waiting(self) -> bool:
        """True if the last turn ended at a stop string, as a call of a tool does, and nothing has
        been appended since; False once it is closed."""
        return not self.closed and isinstance(self.stopped_by, str)

    @property
    def live(self) -> bool:
        """True if `Session.sample` draws on: it is not closed, and its last turn did not end by
        itself ("stop") or in an error, or something was appended since."""
        last = self.spans[-1].sample if self.spans else None
        ended = last is not None and last.finish_reason not in ("length", "cancelled")
        return not self.closed and not ended

    def append(self, more: str | Sequence[int]) -> None:
        """Append a text or token ids, such as a tool's answer; a text is tokenized alone."""
        tokens = self.session.encode(more)
        if tokens:
            self.spans.append(Span(tokens))

    def fork(self, num_samples: int = 1) -> list["Branch"]:
        """Make `num_samples` branches that begin with the text so far; this one stays as it is."""
        count = check_whole("num_samples", num_samples, 1)
        made = [
            Branch(self.session, (*self.path, self.forks + j), [*self.spans]) for j in range(count)
        ]
        self.forks += count
        self.session.branches += made
        return made

    def close(self) -> None:
        """End the branch: later turns leave it out."""
        self.closed = True


class SessionTurns:
    """Branches of a prompt, in the order in which they were made; base of the sessions."""

    def __init__(
        self, prompt: list[int], num_samples: int, seed: int, tokenizer: Any, vocab: int
    ) -> None:
        self.prompt, self.seed, self.tokenizer, self.vocab = prompt, seed, tokenizer, vocab
        self.branches = [Branch(self, (i,)) for i in range(num_samples)]
        self.read_tokens = 0  # tokens that the model has read as parts of prompts
        self.cached_tokens = 0  # tokens of turns' prompts that were not read again
        self.rows = 0  # rows of the model in turns' steps: those of equal texts are shared

    def __len__(self) -> int:
        return len(self.branches)

    def __getitem__(self, i: int) -> Branch:
        return self.branches[i]

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.branches)

    def __repr__(self) -> str:
        """The numbers of branches, and of tokens that the model has read and not read again."""
        return (
            f"<csd.{type(self).__name__} of {len(self)} branches, {len(self.live)} live, "
            f"{len(self.waiting)} waiting; {self.read_tokens:,} tokens read, "
            f"{self.cached_tokens:,} cached>"
        )

    @property
    def live(self) -> list[Branch]:
        """Branches that the next turn continues."""
        return [branch for branch in self.branches if branch.live]

    @property
    def waiting(self) -> list[Branch]:
        """Branches that wait for an answer: their last turn ended at a stop string."""
        return [branch for branch in self.branches if branch.waiting]

    def encode(self, more: str | Sequence[int]) -> list[int]:
        if not isinstance(more, str):
            return [check_whole("append", token, 0, self.vocab - 1) for token in more]
        if self.tokenizer is None:
            raise ValueError(f"append needs token ids without a tokenizer, got {more[:40]!r}")
        return list(self.tokenizer(more, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: make the engine with tokenizer=")
        return str(self.tokenizer.decode(tokens))

    def of_turn(
        self, branches: Sequence[Branch] | None, options: Mapping[str, Any]
    ) -> list[Branch]:
        """Branches that a turn continues. Raises TypeError for an option that the session sets."""
        for name in options:
            if name in OWN:
                raise TypeError(f"{name} is not an argument of a session's turn")
        return self.live if branches is None else [*branches]

    def end_turn(self, turn: Sequence[Branch], outs: Sequence[Samples]) -> list[Sample]:
        """Append the samples of the turn's requests to their branches; returns one for each.

        outs: of the requests of `requests_of(turn)`.
        """
        samples = []
        for mates, out in zip(requests_of(turn), outs, strict=True):
            drawn = {sample.index: sample for sample in out}
            self.cached_tokens += out.stats.cached_tokens
            self.rows += out.stats.rows
            self.read_tokens += len(out.prompt_ids) - 1 - out.stats.cached_tokens
            for branch in mates:
                index = branch.path[-1]
                failed = Sample(index, None, [], [], [], "error", error=out.error)
                sample = drawn.get(index, failed)
                branch.spans.append(Span(sample.tokens, sample))
                samples.append(sample)
        return samples


def requests_of(turn: Sequence[Branch]) -> list[list[Branch]]:
    """The branches of a turn in runs that one request draws: with one parent, text and rising
    indices."""
    runs: list[list[Branch]] = []
    for branch in turn:
        last = runs[-1][-1] if runs else None
        follows = last is not None and branch.path == (*last.path[:-1], last.path[-1] + 1)
        if follows and last is not None and branch.tokens == last.tokens:
            runs[-1].append(branch)
        else:
            runs.append([branch])
    return runs


class Session(SessionTurns):
    """A session of an `Engine`, which `Engine.session` makes."""

    def __init__(self, engine: Any, prompt: Any, num_samples: int, seed: int | None) -> None:
        num_samples = check_whole("num_samples", num_samples, 1)
        call = engine.prepare(prompt, num_samples=1, seed=seed)
        if call.many:
            raise ValueError(f"prompt must be one prompt, got {len(call.requests)}")
        request = call.requests[0]
        vocab = engine.config.vocab
        super().__init__(request.prompt, num_samples, request.seed, engine.tokenizer, vocab)
        self.engine = engine

    def sample(
        self, branches: Sequence[Branch] | None = None, **options: Unpack[Options]
    ) -> list[Sample]:
        """Continue branches, by default all live ones; returns a sample for each.

        options: as in `Engine.generate`, except those that the session sets: number and indices of
        samples, seed, history and record. Raises as `generate` does; the branches then stay as
        they are.
        """
        turn = self.of_turn(branches, options)
        if not turn:
            return []
        runs = requests_of(turn)
        prompts = [mates[0].prompt for mates in runs]
        call = self.engine.prepare(prompts, **options, num_samples=1)
        call.requests = [
            request.drawing(
                range(mates[0].path[-1], mates[-1].path[-1] + 1),
                seed_of(self.seed, mates[0].path[:-1]),
                self,
                len(mates[0].tokens),
            )
            for request, mates in zip(call.requests, runs, strict=True)
        ]
        return self.end_turn(turn, self.engine.results(call))
