"""`csd eval`: a file of problems, N samples each; stopped at any time, it goes on where it was."""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from csd.engine import Engine
from csd.metrics import mean_interval, pass_at_k
from csd.prompts import as_message
from csd.result import Samples
from csd.tasks import Problem, Task
from csd.vote import Vote, drawn, vote


class Results:
    """The JSONL file of a run: a line of settings, then one line a problem, in their order.

    A line is on disk before the next problem is drawn. What an interruption left of a line is cut.
    One process at a time may hold a file.

    Raises ValueError when the file was written with other settings or is held by another process.
    """

    def __init__(self, path: str | Path, settings: dict):
        self._file = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path} is being written by another process") from None
        self._file.seek(0)
        data = self._file.read()
        first = _line({"settings": settings})
        whole = data.rfind(b"\n") + 1
        try:
            # nothing is cut of a file that is not a run's
            if not whole and not first.startswith(data):
                raise ValueError(f"{path} is not a results file of csd eval; choose another -o")
            lines = _parsed(path, data[:whole], settings)
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(whole if len(lines) > 1 else 0)
        if len(lines) < 2:
            lines = []
            self._write([{"settings": settings}])
        self.rows: list[dict] = lines[1:]

    def add(self, rows: list[dict]) -> None:
        self._write(rows)
        self.rows += rows

    def close(self) -> None:
        self._file.close()

    def _write(self, rows: list[dict]) -> None:
        self._file.write(b"".join(map(_line, rows)))
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(row: dict) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _parsed(path: str | Path, data: bytes, settings: dict) -> list[dict]:
    """The lines of a results file. Raises ValueError where they are not those of these settings.

    A run that drew nothing, of a model that was not there, does not bind the next one.
    """
    lines = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    if not lines:
        return []
    have = lines[0].get("settings") if isinstance(lines[0], dict) else None
    if not isinstance(have, dict):
        raise ValueError(f"{path} is not a results file of csd eval; choose another -o")
    for at, row in enumerate(lines[1:]):
        found = row.get("problem") if isinstance(row, dict) else None
        if found != at:
            raise ValueError(f"{path}, line {at + 2} must hold problem {at}, got {found!r}")
    if len(lines) > 1 and have != settings:
        keys = [k for k in {**have, **settings} if have.get(k) != settings.get(k)]
        what = ", ".join(f"{k} {have.get(k)!r}, now {settings.get(k)!r}" for k in keys)
        raise ValueError(f"{path} was written with {what}; choose another -o, or remove it")
    return lines


def digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def run(
    engine: Engine,
    problems: list[Problem],
    task: Task,
    results: Results,
    *,
    num_samples: int,
    chat: bool,
    batch: int = 1,
    until: Vote | None = None,
    on_sample: Callable[[], object] = lambda: None,
    **options: Any,
) -> Iterator[list[dict]]:
    """Draw what `results` lacks of `problems`, `batch` of them at a time; yields the new rows.

    options: those of `csd.generate`; `seed` must be given. Samples do not depend on where a run was
    interrupted, nor on `batch`; a problem that occurs again gets new samples.
    """
    prompts = [as_message(p.prompt, chat) for p in problems]
    seen: Counter = Counter()
    first = []  # of each problem's sample indices
    for prompt in prompts:
        key = json.dumps(prompt)
        first.append(seen[key] * num_samples)
        seen[key] += 1
    todo = list(range(len(results.rows), len(problems)))
    _check([(problems[i].index, prompts[i]) for i in todo], engine, options)
    while todo:
        # repeated problems go alone, for their own first_sample
        take = 1
        while take < min(batch, len(todo)) and first[todo[take]] == first[todo[0]] == 0:
            take += 1
        block, todo = todo[:take], todo[take:]
        outs, seconds = _draw(
            engine, [prompts[i] for i in block], on_sample,
            num_samples=num_samples, first_sample=first[block[0]], until=until, **options,
        )  # fmt: skip
        rows = [
            _row(problems[i], task, out, seconds / take) for i, out in zip(block, outs, strict=True)
        ]
        results.add(rows)
        yield rows


def _check(prompts: list, engine: Engine, options: dict) -> None:
    """Refuse what cannot be drawn before hours go into the problems in front of it."""
    from csd.call import Call

    for index, prompt in prompts:
        try:
            Call(engine, prompt, options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"problem {index}: {error}") from error


def _draw(
    engine: Engine, prompts: list, on_sample: Callable[[], object], **options: Any
) -> tuple[list[Samples], float]:
    from csd.call import Call

    # not csd.generate, which returns half a problem on Ctrl-C
    start = time.perf_counter()
    call = Call(engine, prompts, options)
    for _ in call.run():
        on_sample()
    return call.results(), time.perf_counter() - start


def _row(problem: Problem, task: Task, out: Samples, seconds: float) -> dict:
    decision = vote(out, task.extract)
    return {
        "problem": problem.index,
        "answer": problem.answer,
        "vote": decision.answer,
        "vote_correct": decision.answer == problem.answer,
        "answers": decision.answers,
        "correct": [a == problem.answer for a in decision.answers],
        "finish_reasons": out.finish_reasons,
        "texts": [s.text for s in drawn(out)],
        "tokens": out.stats.tokens,
        "steps": out.stats.sample_steps,
        "seconds": seconds,
    }


def summary(rows: list[dict], num_samples: int, until: Vote | None = None) -> dict:
    """Figures over problems, each (mean, low, high) with its 95% interval.

    With `until`, accuracy and pass@k are over the samples that are drawn whatever their answers:
    an average over all that were drawn would be biased by the decision to stop.
    """
    count = num_samples if until is None else until.least(num_samples)
    ks = sorted({*(2**i for i in range(count.bit_length())), count})
    result = {
        "problems": len(rows),
        "samples": num_samples,
        "samples_counted": count,
        "samples_drawn": sum(len(r["correct"]) for r in rows),
        f"maj@{num_samples}": mean_interval([float(r["vote_correct"]) for r in rows]),
    }
    for k in ks:
        values = [pass_at_k(r["correct"][:count], k) for r in rows]
        result["accuracy@1" if k == 1 else f"pass@{k}"] = mean_interval(values, count)
    reasons = Counter(reason for r in rows for reason in r["finish_reasons"])
    tokens, steps, seconds = (sum(r[k] for r in rows) for k in ("tokens", "steps", "seconds"))
    return result | {
        "answered": sum(a is not None for r in rows for a in r["answers"])
        / max(1, sum(len(r["answers"]) for r in rows)),
        # shares of the samples
        "finish_reasons": {k: n / reasons.total() for k, n in sorted(reasons.items())},
        "tokens": tokens,
        "tau": tokens / max(steps, 1),
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }
