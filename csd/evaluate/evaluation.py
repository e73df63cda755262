"""`csd eval`: draws N samples per problem; an interrupted run can be resumed."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from csd.engine.engine import Engine
from csd.engine.options.thinking import after_thoughts
from csd.engine.results.result import Sample, Samples
from csd.evaluate.answers.equality import canonical
from csd.evaluate.code.execute import outcomes
from csd.evaluate.code.program import ASK, of_answer
from csd.evaluate.pass_at_k import maj_at_k, mean_interval, pass_at_k
from csd.evaluate.problems.tasks import Problem, Task
from csd.evaluate.resumable_results import ResumedFile
from csd.evaluate.vote import Decision, Vote, counts, drawn, text_of, vote
from csd.models.text.prompts import as_message
from csd.traces.history import History
from csd.traces.receipt import Receipt, with_logprobs
from csd.utils.check import AtLeast, Between, check, shown

# a caution beside seconds of k samples, which are the run's by the share of their tokens
ALONE = "k samples alone take longer than that: samples drawn together share passes of the model."


class ResultRow(TypedDict):
    """A line of a results file: a problem and its samples' results."""

    problem: int
    question: NotRequired[str]  # not in files of earlier versions
    answer: str
    vote: str | None
    vote_correct: bool
    answers: Annotated[list[str | None], AtLeast(1)]  # answers of the samples that count
    correct: Annotated[list[bool], AtLeast(1)]
    finish_reasons: Annotated[list[str], AtLeast(1)]
    error: NotRequired[str | None]  # reason why the problem could not be served
    tested: NotRequired[bool]  # True if samples are programs, which do not vote
    thoughts_cut: NotRequired[Annotated[int, Between(0)]]  # counted samples with a cut thought
    texts: list[str | None]
    tokens: Annotated[int, Between(0)]
    steps: Annotated[int, Between(0)]
    seconds: Annotated[float, Between(0)]
    receipt: NotRequired[Receipt]  # not in files of earlier versions


class Settings(TypedDict):
    """Settings in the first line of a results file, as far as its figures depend on them."""

    num_samples: Annotated[int, Between(1, 2**31)]
    until_decided: NotRequired[bool]


class Results(ResumedFile):
    """The JSONL file of a run: a line of settings, then one line per problem, in order.

    Raises ValueError like `ResumedFile`.
    """

    def __init__(self, path: str | Path, settings: dict):
        super().__init__(path, settings, _check_line, "results file of csd eval")


def _check_line(index: int, row: Any) -> None:
    problem = row.get("problem") if isinstance(row, dict) else None
    if problem != index:
        raise ValueError(f"must have problem {index}, got {shown(problem)}")
    check_row(row)


def check_row(row: Any) -> None:
    """Raises ValueError unless `row` is a line of a results file."""
    check(row, ResultRow)
    if len(row["correct"]) != len(row["answers"]):
        raise ValueError(
            f"must have one answer per entry of 'correct', got {len(row['answers'])} for "
            f"{len(row['correct'])}"
        )


def run(
    engine: Engine,
    problems: list[Problem],
    task: Task,
    results: Results,
    *,
    num_samples: int,
    chat: bool,
    batch: int | None = 1,
    until: Vote | None = None,
    on_sample: Callable[[], object] = lambda: None,
    history: History | None = None,
    limited: bool = False,
    **options: Any,
) -> Iterator[list[dict]]:
    """Draw the `problems` missing from `results`, `batch` at a time; yields the new rows.

    batch: None for as many as fill the engine's slots and fit into its memory. history: past
    samples to draft from; the drawn samples are added. options: those of `csd.generate`; `seed`
    must be given. limited: True if samples that were cut at `max_new_tokens` have answers. Samples
    do not depend on where a run was interrupted, nor on `batch`; a repeated problem gets new
    samples. With on_error="return" a problem that cannot be served counts as one without a right
    answer. Programs of problems with tests are run (`csd.evaluate.code`).

    Raises ImportError, before any drawing, for answers that need the extra `latex`.
    """
    for problem in problems:
        if problem.tests is None:
            canonical(problem.answer)
    prompts = [as_message(_asked(p, chat), chat) for p in problems]
    seen: Counter = Counter()
    first = []  # first sample index of each problem
    for prompt in prompts:
        key = json.dumps(prompt)
        first.append(seen[key] * num_samples)
        seen[key] += 1
    todo = list(range(len(results.rows), len(problems)))
    longest = _longest([(problems[i].index, prompts[i]) for i in todo], engine, options)
    if batch is None:
        batch = _batch(engine, longest, num_samples, options)
    while todo:
        # a repeated problem is drawn alone, because it has its own first_sample
        take = 1
        while take < min(batch, len(todo)) and first[todo[take]] == first[todo[0]] == 0:
            take += 1
        block, todo = todo[:take], todo[take:]
        outs, seconds, error = _draw(
            engine,
            [prompts[i] for i in block],
            on_sample,
            num_samples=num_samples,
            first_sample=first[block[0]],
            until=until,
            history=history,
            **options,
        )
        receipt = engine.model.receipt()
        rows = [
            _row(problems[i], task, out, seconds / len(outs), num_samples, limited, chat)
            | {"receipt": with_logprobs(receipt, (s.logprobs for s in drawn(out)))}
            for i, out in zip(block, outs, strict=False)
        ]
        if rows:
            results.add(rows)
        if error is not None:
            raise error
        yield rows


def _asked(problem: Problem, chat: bool) -> str | list[dict]:
    """The prompt of a problem; a chat model is asked for a program, others continue it."""
    if problem.tests is None or not chat or not isinstance(problem.prompt, str):
        return problem.prompt
    return ASK.format(problem.prompt.rstrip())


def _longest(prompts: list, engine: Engine, options: dict) -> Any:
    """The prompt with most tokens, or None without prompts.

    Raises ValueError or TypeError, before any drawing, for a problem that cannot be drawn.
    """
    longest, most = None, -1
    for index, prompt in prompts:
        try:
            call = engine.prepare(prompt, **options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"problem {index}: {error}") from error
        size = max(len(request.prompt) for request in call.requests)
        if size > most and all(request.progress.error is None for request in call.requests):
            longest, most = prompt, size
    return longest


def _batch(engine: Engine, longest: Any, num_samples: int, options: dict) -> int:
    """Number of problems, each as long as the longest, whose samples fill the slots that fit."""
    if longest is None:
        return 1
    prompts = [longest] * -(-engine.max_slots // num_samples)
    call = engine.prepare(prompts, num_samples=num_samples, **options)
    return max(1, engine.caches.most_slots(call.requests) // num_samples)


def _draw(
    engine: Engine, prompts: list, on_sample: Callable[[], object], **options: Any
) -> tuple[list[Samples], float, BaseException | None]:
    """Draw prompts; returns the samples of the leading prompts that are complete, the seconds of
    the call, and the error that ended it before the others were complete, or None."""
    call = engine.prepare(prompts, **options)
    for request in call.requests:
        # a stop string within a thought would leave the sample without an answer
        request.stops_in_thought = False
    start = time.perf_counter()
    error = None
    try:
        for _ in engine.draw(call):
            on_sample()
    except BaseException as raised:
        error = raised
    until = call.settings.until
    whole = takewhile(lambda request: error is None or request.progress.whole(until), call.requests)
    return [request.result() for request in whole], time.perf_counter() - start, error


def _row(
    problem: Problem,
    task: Task,
    out: Samples,
    seconds: float,
    num_samples: int,
    limited: bool,
    chat: bool,
) -> dict:
    served = len(out) > 0
    if served and problem.tests is None:
        decision = vote(out, task.extract, limited=limited)
    else:
        none: list[str | None] = [None] * num_samples
        decision = Decision(None, 0, 0, _test(problem, out, limited, chat) if served else none)
    return {
        "problem": problem.index,
        "question": problem.question,
        "answer": problem.answer,
        "vote": decision.answer,
        "vote_correct": _equal(decision.answer, problem.answer),
        "answers": decision.answers,
        "correct": [_equal(answer, problem.answer) for answer in decision.answers],
        "finish_reasons": out.finish_reasons if served else ["error"] * num_samples,
        "error": out.error,
        **({} if problem.tests is None else {"tested": True}),
        "texts": [s.text for s in drawn(out)],
        "thoughts_cut": decision.thoughts_cut,
        "tokens": out.stats.tokens,
        "steps": out.stats.sample_steps,
        "seconds": seconds,
    }


def _test(problem: Problem, out: Samples, limited: bool, chat: bool) -> list[str | None]:
    """Results of the samples' programs; None for a sample without one."""
    prompt, tests = str(problem.prompt), problem.tests
    assert tests is not None

    def program(sample: Sample) -> str | None:
        if not counts(sample, limited):
            return None
        text = text_of(sample)
        if chat:
            text = after_thoughts(text, sample.in_thought)
            return of_answer(text, prompt, tests.entry_point)
        return prompt + text

    programs = [program(sample) for sample in drawn(out)]
    found = outcomes((p for p in programs if p is not None), tests)
    return [None if p is None else found[p] for p in programs]


def _equal(answer: str | None, right: str) -> bool:
    return answer is not None and canonical(answer) == canonical(right)


def summary(rows: list[dict], num_samples: int, until: Vote | None = None) -> dict:
    """Figures over problems, with the keys of `summary` in docs/formats.md; an interval is a tuple
    of mean, low and high.

    With `until`, accuracies for fewer than all samples use only samples that are drawn whatever
    their answers: the decision to stop would bias an average over all drawn samples.
    """
    voted = not any(r.get("tested") for r in rows)
    count = num_samples if until is None else until.least(num_samples)
    drawn_samples = sum(len(r["correct"]) for r in rows)
    reasons = Counter(reason for r in rows for reason in r["finish_reasons"])
    tokens, steps, seconds = (sum(r[k] for r in rows) for k in ("tokens", "steps", "seconds"))
    per_sample = tokens / max(drawn_samples, 1)

    def at_k(k: int) -> dict:
        """Accuracy and cost of k samples per problem."""
        whole = k == num_samples
        votes = passed = None
        # programs have no vote
        if voted:
            right = [float(r["vote_correct"]) if whole else _maj(r, count, k) for r in rows]
            votes = mean_interval(right, 1 if whole else count)
        if k <= count:
            passed = mean_interval([pass_at_k(r["correct"][:count], k) for r in rows], count)
        # with all samples, the actual tokens: a vote that was decided early took fewer
        cost = tokens if whole else k * per_sample * len(rows)
        # the seconds are the run's, by the share of the tokens
        share = seconds * cost / max(tokens, 1)
        return {"k": k, "maj_at_k": votes, "pass_at_k": passed, "tokens": cost, "seconds": share}

    return {
        "problems": len(rows),
        "samples": num_samples,
        "samples_counted": count,
        "samples_drawn": drawn_samples,
        "answered": sum(a is not None for r in rows for a in r["answers"]) / max(1, drawn_samples),
        "limited": reasons["length"],
        "thoughts_cut": sum(r.get("thoughts_cut", 0) for r in rows),
        # shares of the samples
        "finish_reasons": {k: n / reasons.total() for k, n in sorted(reasons.items())},
        "by_k": [
            at_k(k)
            for k in sorted({*(2**i for i in range(count.bit_length())), count, num_samples})
        ],
        "tokens": tokens,
        "tau": tokens / max(steps, 1),
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def _maj(row: dict, count: int, k: int) -> float:
    """Probability that k of the first `count` samples vote right.

    Answers marked correct count as the same answer, even if spelled differently.
    """
    answers = [
        row["answer"] if right else answer
        for answer, right in zip(row["answers"][:count], row["correct"][:count], strict=True)
    ]
    return maj_at_k(answers, row["answer"], k)
