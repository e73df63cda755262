"""Trace files: recorded samples, a JSON line a prompt, written and read."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from csd.schema.check import AtLeast, Between, Token
from csd.schema.read import naming, parse, read_lines

Tokens = Annotated[list[Token], AtLeast(1)]
# a softmax in low precision may round beyond 1
Probability = Annotated[float, Between(0, 1.01)]
# of one position: token ids, -1 where there are no more, and their probabilities
Top = tuple[list[Annotated[int, Between(-1, 2**31 - 1)]], list[Probability]]


class TraceLine(TypedDict):
    """A line of a trace file."""

    prompt_ids: Tokens
    samples: Annotated[list[Tokens], AtLeast(1)]
    problem: NotRequired[int | str]
    temperature: NotRequired[Annotated[float, Between(0)]]
    top: NotRequired[list[list[Top]] | None]
    seed: NotRequired[int | None]
    indices: NotRequired[list[Annotated[int, Between(0)]] | None]
    stop_ids: NotRequired[list[Token]]


@dataclass(slots=True)
class Trace:
    """One line of a trace file."""

    problem: int | str
    prompt: list[int]
    samples: list[list[int]]
    temperature: float
    top: list | None  # [sample][position] of (token ids, probabilities), likeliest first
    seed: int | None = None  # csd's own, which drew the samples
    indices: list[int] | None = None  # of the samples, where csd drew them
    stop_ids: tuple[int, ...] = ()  # tokens that end a sample: nothing is drafted behind them

    @classmethod
    def parse(cls, line: str) -> "Trace":
        """Raises ValueError, which names the place, for a line that is not a trace."""
        with naming("the trace"):
            return cls.of(parse(line.encode(errors="surrogatepass"), TraceLine))

    @classmethod
    def of(cls, line: TraceLine) -> "Trace":
        """Raises ValueError where the lists of a line do not belong together."""
        samples, top, indices = line["samples"], line.get("top"), line.get("indices")
        for name, lists in (("top", top), ("indices", indices)):
            if lists is not None and len(lists) != len(samples):
                raise ValueError(f"must have {len(samples)} entries as {name!r}, got {len(lists)}")
        for tops in top or []:
            for tokens, probabilities in tops:
                if len(tokens) != len(probabilities):
                    raise ValueError(
                        f"must have a probability for each token in 'top', got {len(tokens)} "
                        f"tokens and {len(probabilities)} probabilities"
                    )
        return cls(
            problem=line.get("problem", 0),
            prompt=line["prompt_ids"],
            samples=samples,
            temperature=line.get("temperature", 1.0),
            top=top,
            seed=line.get("seed"),
            indices=indices,
            stop_ids=tuple(line.get("stop_ids", ())),
        )

    def to_dict(self) -> dict:
        """The object of its line."""
        return {
            "problem": self.problem,
            "prompt_ids": self.prompt,
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "indices": self.indices,
            "stop_ids": list(self.stop_ids),
            "top": self.top,
        }


def read_traces(path: str | Path) -> Iterator[Trace]:
    """The traces of a file, which may be gzipped.

    Raises ValueError, which names the file, the line and the place, for what is not a trace.
    """
    for number, line in read_lines(path, TraceLine):
        with naming(f"{path}, line {number}"):
            trace = Trace.of(line)
        yield trace


def write_traces(path: str | Path, traces: Iterable[Trace]) -> None:
    """One JSON line a prompt: its ids, its samples, and the target's top 8 at each position.

    With the seed and the samples' indices the noise that drew them can be computed again. A prompt
    without samples has no line. The file is there whole or not at all.
    """
    lines = (json.dumps(trace.to_dict()) + "\n" for trace in traces if trace.samples)
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        # a pipe or a device is not replaced
        with open(path, "w") as f:
            f.writelines(lines)
        return
    # in the same folder: only there is a rename one step. What a kill leaves is written over
    part = Path(f"{path}.new")
    with open(part, "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the name may have become another process's since
            mine = os.path.samestat(os.fstat(f.fileno()), os.stat(part))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise ValueError(f"{path} is being written by another process")
        try:
            f.truncate(0)
            f.writelines(lines)
            f.flush()
            os.fsync(f.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
