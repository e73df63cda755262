"""Trace files: reading and writing of recorded samples, one JSON line per prompt."""

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from csd.traces.receipt import Receipt
from csd.utils.check import AtLeast, Between, Token
from csd.utils.files import WholeFile, naming, open_regular, parse, read_lines

Tokens = Annotated[list[Token], AtLeast(1)]
# a softmax in low precision may round to more than 1
Probability = Annotated[float, Between(0, 1.01)]
# top tokens of one position: token ids, padded with -1, and their probabilities
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
    receipt: NotRequired[Receipt | None]


@dataclass(slots=True)
class Trace:
    """One line of a trace file."""

    problem: int | str
    prompt: list[int]
    samples: list[list[int]]
    temperature: float
    top: list | None  # [sample][position] of (token ids, probabilities), likeliest first
    seed: int | None = None  # seed of the samples, if csd drew them
    indices: list[int] | None = None  # indices of the samples, if csd drew them
    stop_ids: tuple[int, ...] = ()  # tokens that end a sample: nothing is drafted after them
    receipt: Receipt | None = None  # weights, versions and machine, of samples that csd drew

    @classmethod
    def parse(cls, line: str) -> "Trace":
        """Parse a line; raises ValueError, naming the field, unless it is a trace."""
        with naming("the trace"):
            return cls.of(parse(line.encode(errors="surrogatepass"), TraceLine))

    @classmethod
    def of(cls, line: TraceLine) -> "Trace":
        """Make a trace from a line; raises ValueError if the lengths of its lists do not match."""
        samples, top, indices = line["samples"], line.get("top"), line.get("indices")
        for name, lists in (("top", top), ("indices", indices)):
            if lists is not None and len(lists) != len(samples):
                raise ValueError(f"must have {len(samples)} entries in {name!r}, got {len(lists)}")
        for tops in top or []:
            for tokens, probabilities in tops:
                if len(tokens) != len(probabilities):
                    raise ValueError(
                        f"must have one probability per token in 'top', got {len(tokens)} tokens "
                        f"and {len(probabilities)} probabilities"
                    )
        receipt = line.get("receipt")
        if receipt is not None:
            wanted, hashes = len(samples) if receipt["exact_on"] else 0, len(receipt["logprobs"])
            if hashes != wanted:
                raise ValueError(f"must have {wanted} entries in 'receipt.logprobs', got {hashes}")
        return cls(
            problem=line.get("problem", 0),
            prompt=line["prompt_ids"],
            samples=samples,
            temperature=line.get("temperature", 1.0),
            top=top,
            seed=line.get("seed"),
            indices=indices,
            stop_ids=tuple(line.get("stop_ids", ())),
            receipt=receipt,
        )

    def of_samples(self, places: list[int]) -> "Trace":
        """The trace with the samples at these places alone."""

        def kept(values: list | None) -> list | None:
            return None if values is None else [values[i] for i in places]

        receipt = self.receipt
        if receipt is not None:
            hashes = receipt["logprobs"]
            receipt = {**receipt, "logprobs": [hashes[i] for i in places] if hashes else []}
        return replace(
            self,
            samples=[self.samples[i] for i in places],
            top=kept(self.top),
            indices=kept(self.indices),
            receipt=receipt,
        )

    def to_dict(self) -> dict:
        """Return the JSON object of the trace's line."""
        line = {
            "problem": self.problem,
            "prompt_ids": self.prompt,
            "samples": self.samples,
            "temperature": self.temperature,
            "seed": self.seed,
            "indices": self.indices,
            "stop_ids": list(self.stop_ids),
            "top": self.top,
        }
        return line if self.receipt is None else line | {"receipt": self.receipt}


def read_traces(path: str | Path) -> Iterator[Trace]:
    """Yield the traces of a file, which may be gzipped.

    Raises ValueError, naming the file, the line and the field, for a line that is not a trace.
    """
    for number, line in read_lines(path, TraceLine):
        with naming(f"{path}, line {number}"):
            trace = Trace.of(line)
        yield trace


def open_traces(path: str | Path) -> WholeFile:
    """Open a trace file that is written at the end of a run.

    Raises OSError or ValueError, naming the file, like `WholeFile`. Also raises ValueError if a
    history has the file open, which would keep writing to the replaced file.
    """
    _check_no_history(path)
    return WholeFile(path)


def write_traces(to: str | Path | WholeFile, traces: Iterable[Trace]) -> None:
    """Write one JSON line per prompt: ids, samples, and the target's top 8 at each position.

    The seed and the samples' indices allow the noise that drew them to be computed again. A prompt
    without samples has no line. The file is complete or absent, and gzipped if its name ends in
    ".gz". to: a path, or the result of `open_traces`.
    """
    with to if isinstance(to, WholeFile) else open_traces(to) as file:
        _check_no_history(file.path)
        lines = (f"{json.dumps(trace.to_dict())}\n".encode() for trace in traces if trace.samples)
        file.write(_zipped(lines) if file.path.suffix == ".gz" else lines)


def lock_of(path: str | Path) -> Path:
    """Path of the lock file of a trace file, the same for all of the file's names."""
    return Path(f"{os.path.realpath(path)}.lock")


def _check_no_history(path: str | Path) -> None:
    try:
        with open(open_regular(lock_of(path), os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is open as a History, which appends to it") from None
    except OSError:
        # no lock file: no history was ever opened there
        return


def _zipped(lines: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31)
    yield from map(packer.compress, lines)
    yield packer.flush()
