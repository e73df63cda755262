"""History for `csd.generate(history=...)`: finished samples of previous calls, by prompt.

A token takes 4 bytes of memory, or 52 with the target's top 8. With `path` every addition is also
written as a line of a trace file (`csd.traces.journal`).
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from csd.graph.history import PastSample
from csd.traces.journal import Journal
from csd.traces.traces import Trace
from csd.utils.arguments import check_flag, check_path, check_whole
from csd.utils.cache_folder import watch_forks


class History:
    """The newest past samples of each prompt.

    samples: largest number of samples per prompt. tokens: largest number of tokens of all prompts
        and samples; the least recently used prompt is dropped first.
    path: a trace file that also holds the samples. It is read first, and may be one that
        `csd record` wrote; every addition is appended. Dropped samples stay in it until their
        tokens exceed both `tokens` and the tokens held; then it is rewritten without them. A file
        that is removed while open is written again, with the samples held. Only one `History` at a
        time may have it open. None keeps everything in memory.
    epochs: largest number of additions kept per prompt; None is no limit.
    top: also keep the target's top 8 probabilities at each token, which improve drafts.

    A sample is used only for the prompt with exactly its token ids, and counts half as much with
    each later addition of that prompt.

    Raises ValueError for a file that is not a trace file or that another `History` has open; the
    message names the line.
    """

    def __init__(
        self,
        samples: int = 8,
        tokens: int = 4_000_000,
        path: str | Path | None = None,
        *,
        epochs: int | None = None,
        top: bool = False,
    ):
        samples, tokens = check_whole("samples", samples, 1), check_whole("tokens", tokens, 1)
        epochs = None if epochs is None else check_whole("epochs", epochs, 1)
        top = check_flag("top", top)
        if path is not None:
            check_path("path", path)
        self.samples, self.tokens, self.epochs, self.top = samples, tokens, epochs, top
        self.size = 0  # tokens held, including those of prompts
        self._groups: OrderedDict[bytes, _Group] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        watch_forks(self)
        self._journal: Journal | None = None
        if path is not None:
            journal = Journal(path)
            for trace in journal.read():
                self._put(trace)
            self._journal = journal

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another process can open it.

        Stored samples stay readable; none can be added.
        """
        if self._journal is not None:
            self._journal.close()

    @property
    def closed(self) -> bool:
        return self._journal is not None and self._journal.closed

    def __repr__(self) -> str:
        """Prompts, and the tokens held of the most; the file, and whether it is closed."""
        where = "" if self._journal is None else f" in {self._journal.path}"
        return (
            f"<csd.History of {len(self)} prompts, {self.size:,} of {self.tokens:,} tokens"
            f"{where}{', closed' * self.closed}>"
        )

    def __len__(self) -> int:
        """Number of prompts with samples."""
        return len(self._groups)

    def __contains__(self, prompt: Sequence[int]) -> bool:
        return _key(prompt) in self._groups

    @property
    def nbytes(self) -> int:
        """Bytes of the token ids and probabilities held."""
        return sum(len(key) + group.nbytes for key, group in self._groups.items())

    def of(self, prompt: Sequence[int]) -> list[PastSample]:
        """Return the samples of the prompt with these token ids, newest first."""
        key = _key(prompt)
        with self._lock:
            if key not in self._groups:
                return []
            self._groups.move_to_end(key)
            return list(self._groups[key].newest())

    def add(
        self,
        prompt: Sequence[int],
        samples: Sequence[Sequence[int]],
        top: Sequence | None = None,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        indices: Sequence[int] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Add samples of a prompt, lists of token ids, that were drawn together.

        top: (token ids, probabilities) per sample and position, likeliest first. The other
        arguments are only written to the file; rewriting the file drops `indices`.
        """
        # samples that would be dropped at once are not written to the file either
        newest = slice(-self.samples, None)
        trace = Trace(
            problem=0,
            prompt=[int(t) for t in prompt],
            samples=[[int(t) for t in s] for s in samples[newest]],
            temperature=temperature,
            top=None if top is None or not self.top else list(top[newest]),
            seed=seed,
            indices=None if indices is None else list(indices[newest]),
            stop_ids=tuple(stop_ids),
        )
        if not any(trace.samples):
            return
        with self._lock:
            if self._journal is not None:
                removed = self._journal.removed()
                if not removed:
                    self._journal.append(trace)
                if removed or self._journal.tokens > self.size + max(self.size, self.tokens):
                    self._put(trace)
                    self._journal.rewrite(self.traces())
                    return
            self._put(trace)

    def check(self) -> None:
        """Raise ValueError or OSError, naming the file, if nothing could be added now."""
        if self._journal is None:
            return
        with self._lock:
            if self._journal.removed():
                self._journal.rewrite(self.traces())
            self._journal.check()

    @property
    def files(self) -> set[Path]:
        """Files that the history writes."""
        return set() if self._journal is None else self._journal.files

    def traces(self) -> Iterator[Trace]:
        """Yield the stored samples, one trace per addition."""
        for key, group in self._groups.items():
            for epoch in group.epochs:
                yield epoch.trace(np.frombuffer(key, np.int32).tolist())

    def _put(self, trace: Trace) -> None:
        if not any(trace.samples):
            return
        key = _key(trace.prompt)
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        before = group.size
        tops = trace.top if self.top and trace.top else [None] * len(trace.samples)
        group.epochs.append(
            _Epoch(
                [PastSample.of(s, t) for s, t in zip(trace.samples, tops, strict=True) if s],
                trace.temperature,
                trace.seed,
                trace.stop_ids,
            )
        )
        group.cut(self.samples, self.epochs)
        self.size += group.size - before + (len(trace.prompt) if not before else 0)
        while self.size > self.tokens:
            self._drop()

    def _drop(self) -> None:
        """Drop the least recently used prompt; if only one is left, its oldest sample."""
        key, group = next(iter(self._groups.items()))
        if len(self._groups) == 1 and group.count > 1:
            before = group.size
            group.cut(group.count - 1, None)
            self.size -= before - group.size
        else:
            del self._groups[key]
            self.size -= group.size + len(key) // 4


@dataclass(slots=True)
class _Epoch:
    """Samples of one addition, in order of their indices."""

    samples: list[PastSample]
    temperature: float
    seed: int | None
    stop_ids: tuple[int, ...]

    def trace(self, prompt: list[int]) -> Trace:
        tops = [s.top for s in self.samples]
        return Trace(
            problem=0,
            prompt=prompt,
            samples=[s.tokens.tolist() for s in self.samples],
            temperature=self.temperature,
            top=None if None in tops else [_lists(t) for t in tops if t is not None],
            seed=self.seed,
            stop_ids=self.stop_ids,
        )


class _Group:
    """The additions of one prompt, oldest first."""

    def __init__(self) -> None:
        self.epochs: deque[_Epoch] = deque()

    @property
    def count(self) -> int:
        return sum(len(e.samples) for e in self.epochs)

    @property
    def size(self) -> int:
        return sum(len(s) for e in self.epochs for s in e.samples)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for e in self.epochs for s in e.samples)

    def cut(self, samples: int, epochs: int | None) -> None:
        """Keep only the newest `epochs` additions, and of these the newest `samples` samples."""
        while epochs is not None and len(self.epochs) > epochs:
            self.epochs.popleft()
        while (over := self.count - samples) > 0:
            oldest = self.epochs[0].samples
            del oldest[:over]
            if not oldest:
                self.epochs.popleft()

    def newest(self) -> Iterator[PastSample]:
        for age, epoch in enumerate(reversed(self.epochs)):
            for sample in reversed(epoch.samples):
                yield PastSample(sample.tokens, sample.top, age)


def _key(prompt: Sequence[int]) -> bytes:
    return np.asarray(prompt, np.int32).tobytes()


def _lists(top: tuple[np.ndarray, np.ndarray]) -> list:
    """(token ids, probabilities) of each position; rounded to 5 digits, as float16 has four."""
    ids, probs = top
    rows = zip(ids.tolist(), probs.astype(float).tolist(), strict=True)
    return [
        [[t for t in i if t >= 0], [round(x, 5) for t, x in zip(i, p, strict=True) if t >= 0]]
        for i, p in rows
    ]
