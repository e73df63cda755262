"""`csd eval gsm8k --model MODEL -n 16`, or a file of problems with `--task gsm8k`.

It draws and grades the samples, and ends with a table of accuracy by their number and cost.
"""

import hashlib
import json
import os
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csd.cli.common import (
    MODEL,
    add_command,
    add_history_flag,
    add_plain_flags,
    check_counts,
    open_history,
    stamped,
)
from csd.engine.generate import engine_for
from csd.engine.options.show import LOADING, add_flags, check_flags, loading
from csd.evaluate import evaluation as evaluate
from csd.evaluate.problems.data_sets import NAMES, Source
from csd.evaluate.problems.tasks import TASKS, Task
from csd.evaluate.vote import Vote
from csd.models.text.prompts import has_chat
from csd.state.filters import FILTERS
from csd.utils.files import WholeFile
from csd.utils.phases import showing

# options that the results of a run depend on
OPTIONS = (
    *FILTERS,
    *("max_new_tokens", "max_thinking_tokens", "seed", "truncate_prompt", "on_error"),
)
# all that an engine or the run takes
FLAGS = ("num_samples", *OPTIONS, "budget", "prior", *LOADING)
# options added later: the settings of older results do not have them
LATER = ("max_thinking_tokens",)


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "eval",
        "draw N samples for each problem of a data set or file, and grade them",
        [
            "csd eval gsm8k --model MODEL -n 16 --shots 5 -o results.jsonl",
            "csd eval humaneval --model MODEL -n 16 --temperature 0.2 --run-code",
            "csd eval gsm8k.jsonl --task gsm8k --model MODEL -n 16 -o results.jsonl",
            "csd eval mine.jsonl --model MODEL -n 8 --until-decided --limit 100",
        ],
        "howto/self_consistency.md",
    )
    parser.add_argument(
        "problems",
        metavar="PROBLEMS",
        help=f"{', '.join(NAMES)}: a data set of the hub, by the package datasets; or a JSONL file "
        "with one problem per line, or a folder that datasets reads. Keys by task: gsm8k: "
        "question, answer; math: problem, answer; humaneval: prompt, test, entry_point; letter: "
        "question with its options, answer (A to J); jsonl: prompt (a string or messages), answer",
    )
    parser.add_argument("--model", required=True, help=MODEL)
    parser.add_argument(
        "--task",
        choices=TASKS,
        help="kind of problems: the keys of a line and how answers are extracted (default: that "
        "of the named data set, or jsonl)",
    )
    parser.add_argument(
        "-o", "--out", help="results file, JSONL; an interrupted run continues from it"
    )
    parser.add_argument(
        "--batch",
        type=_batch,
        default="auto",
        help="number of problems drawn at a time; auto: as many as fill the slots that fit into "
        "memory. The samples do not depend on it",
    )
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="text of worked examples in front of each question",
    )
    add_flags(parser, FLAGS, num_samples=16, seed=0)
    add_history_flag(parser)
    add_plain_flags(
        parser,
        "plain",
        limit=(int, "number of problems to take from the start of the file"),
        shots=(
            int,
            "number of worked examples in front of each question, the first of the train split",
        ),
        run_code="run the programs that the model writes, for pass@k of humaneval, as this user, "
        "guarded against accidents only: a hostile program can do what this user can; see "
        "docs/evaluation.md",
        until_decided="stop drawing samples of a problem when its vote can no longer change",
        limited_vote="also count the votes of samples that were cut at max_new_tokens; by default "
        "they have no answer",
        quiet="show no progress bar",
    )
    parser.set_defaults(run=_eval)


def _eval(args: Namespace) -> int:
    from tqdm import tqdm

    check_flags(args, FLAGS)
    check_counts(args, ("batch", "limit", "shots"))
    source = Source.of(args.problems, args.task)
    task = source.task
    lacking = [*_code_lacks(args, task)]
    lacking += source.lacks(bool(lacking))
    if lacking:
        raise ValueError("; ".join(lacking))
    prefix = _examples(args, source)
    problems, digest = source.read(prefix)
    problems = problems[: args.limit]
    out = Path(args.out or f"{Path(args.problems).stem}.out.jsonl")
    options = {name: getattr(args, name) for name in OPTIONS}
    settings = {
        "model": args.model,
        "revision": args.revision,
        "dtype": args.dtype,
        **({} if args.quantization is None else {"quantization": args.quantization}),
        "problems_sha256": digest,
        "task": source.task_name,
        "num_samples": args.num_samples,
        "until_decided": args.until_decided,
        "plain": args.plain,
        "limited_vote": args.limited_vote,
        **{k: v for k, v in options.items() if k not in LATER or v is not None},
    }
    if prefix is not None:
        settings["examples_sha256"] = hashlib.sha256(prefix.encode()).hexdigest()
    until = Vote(task.extract, limited=args.limited_vote) if args.until_decided else None
    results = evaluate.Results(out, settings)
    summary = None
    try:
        summary = WholeFile(out.with_suffix(".summary.json"))
        with showing(False if args.quiet else None):
            engine = engine_for(args.model, **loading(args))
        chat = has_chat(engine.tokenizer) and not args.plain
        have = min(len(results.rows), len(problems))
        if have:
            print(f"{out} holds {have} of {len(problems)} problems", file=sys.stderr)
        n = args.num_samples
        if prefix is not None or (task.entry_point and not chat):
            options["stop"] = list(task.stop)
        with (
            open_history(args.history) as history,
            tqdm(
                total=len(problems) * n, initial=have * n, unit="sample", disable=args.quiet
            ) as bar,
        ):
            for _ in evaluate.run(
                engine,
                problems,
                task,
                results,
                num_samples=n,
                chat=chat,
                batch=args.batch,
                until=until,
                budget=args.budget,
                prior=args.prior,
                on_sample=bar.update,
                history=history,
                limited=args.limited_vote,
                progress=False,
                **options,
            ):
                bar.n = len(results.rows) * n
                bar.set_postfix(_so_far(results.rows, n))
    except KeyboardInterrupt:
        print(f"\ninterrupted; run the same command again to continue from {out}", file=sys.stderr)
        return 130
    else:
        figures = evaluate.summary(results.rows[: len(problems)], n, until)
        try:
            output = stamped("summary", named(figures))
            summary.write([f"{json.dumps(output, indent=1)}\n".encode()])
        finally:
            print(shown(figures, args), file=sys.stderr)
            # on a terminal the table above has it
            if not sys.stdout.isatty():
                print(json.dumps(output))
        return 0
    finally:
        results.close()
        if summary is not None:
            summary.close()


def _batch(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _code_lacks(args: Namespace, task: Task) -> Iterator[str]:
    """Reasons for which programs must not run or cannot, and options without a meaning."""
    if not task.entry_point:
        if args.run_code:
            yield "run_code needs problems with tests: humaneval, or --task humaneval"
        return
    if not args.run_code:
        yield (
            "humaneval runs programs that the model writes, which may do harm as any program of "
            "yours may: give --run-code, on a machine or in a container where that is allowed"
        )
    if os.name != "posix":
        yield "run_code needs Linux or macOS, whose processes have the limits"
    for name in ("until_decided", "shots", "prompt_file"):
        if getattr(args, name):
            yield f"{name} needs problems with answers, but humaneval has tests"


def _examples(args: Namespace, source: Source) -> str | None:
    """Text of worked examples in front of each question; None without."""
    if args.shots is not None and args.prompt_file is not None:
        raise ValueError("shots and prompt_file are two sources of worked examples: give one")
    if args.shots is not None:
        return source.shots(args.shots)
    return None if args.prompt_file is None else Path(args.prompt_file).read_text("utf-8")


def _so_far(rows: list[dict], n: int) -> dict[str, str]:
    """Figures shown next to the progress bar."""
    drawn = sum(len(row["correct"]) for row in rows)
    tokens, steps, seconds = (sum(r[k] for r in rows) for k in ("tokens", "steps", "seconds"))
    if any(row.get("tested") for row in rows):
        name, right = "pass", (any(row["correct"]) for row in rows)
    else:
        name, right = "maj", (row["vote_correct"] for row in rows)
    return {
        "acc@1": f"{sum(sum(row['correct']) for row in rows) / max(drawn, 1):.3f}",
        f"{name}@{n}": f"{sum(right) / len(rows):.3f}",
        "tau": f"{tokens / max(steps, 1):.2f}",
        "tokens/s": f"{tokens / max(seconds, 1e-9):.0f}",
    }


def named(figures: dict) -> dict:
    """Convert the figures of `csd.evaluate.evaluation.summary` to those of the JSON output."""

    def interval(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return dict(zip(("value", "low", "high"), value, strict=True))

    by_k = [{k: interval(v) for k, v in row.items()} for row in figures["by_k"]]
    return figures | {"by_k": by_k}


def shown(figures: dict, args: Namespace) -> str:
    """Table of accuracy and cost by the number of samples, then totals and cut samples."""
    lines = ["    k  maj@k (95% interval)    pass@k (95% interval)       tokens    seconds*"]
    for row in figures["by_k"]:
        maj, passed = (
            "" if row[name] is None else "{:.3f} ({:.3f} to {:.3f})".format(*row[name])
            for name in ("maj_at_k", "pass_at_k")
        )
        lines.append(
            f"{row['k']:5}  {maj:22}  {passed:22} {row['tokens']:12,.0f} {row['seconds']:10,.1f}"
        )
    lines.append("* of the run, in proportion to the tokens: k samples drawn alone take longer")
    lines.append(
        f"{figures['problems']} problems, {figures['tokens']:,} tokens in "
        f"{figures['seconds']:.1f} s: {figures['tokens_per_second']:.0f} per second, "
        f"{figures['tau']:.2f} per step of a sample; {figures['answered']:.0%} of the samples "
        "have an answer"
    )
    if args.until_decided and figures["samples_counted"] < figures["samples"]:
        lines.append(
            f"--until-decided: pass@k and maj@k below k = {figures['samples']} count the first "
            f"{figures['samples_counted']} samples of each problem, which are always drawn"
        )
    cut = figures["limited"]
    if cut:
        votes = "still voted" if args.limited_vote else "did not vote"
        limit = "the limit" if args.max_new_tokens is None else f"{args.max_new_tokens} tokens"
        lines.append(
            f"{cut} of {figures['samples_drawn']} samples were cut at {limit} and {votes}: "
            "raise --max-new-tokens"
        )
    if figures["thoughts_cut"]:
        lines.append(f"the thoughts of {figures['thoughts_cut']} samples were cut")
    return "\n".join(lines)
