"""Prompts that begin alike: seconds and tokens read with the prefix cache and without.

    python -m bench prefix --data gsm8k_test.jsonl [MODEL] [--problems 16] [--tokens 100] --json F

SmolLM2-135M when no model is given. The data are JSON lines with `question` and `answer`: the first
8 are the worked examples of every prompt, and the next are the problems.

    evaluation      8 worked examples and a problem, in one call
    chat            6 turns, in each of which the prompt is the whole chat so far
    equal prompts   a training step's prompts, drawn twice with two seeds
    nothing shared  problems only, of about 400 tokens each, with few tokens to draw

Both sides run in turn on one thread and begin each round with empty caches; "speed-up" is the
median over rounds of the time without the cache divided by that with it, in CPU seconds of the
process. "read" are tokens of prompts that the model has read, "again" the share of them that an
earlier prompt of the round begins with too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch

import csd
from bench.lib.common import finish, table
from csd.models.demo import smollm2_path

EXAMPLES, TURNS = 8, 6
# a job: runs over an engine and yields the results of each call
Job = Callable[[csd.Engine], Iterator[csd.Samples]]


def worked(rows: list[dict]) -> str:
    return "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows)


def jobs(engine: csd.Engine, rows: list[dict], problems: int, tokens: int) -> dict[str, Job]:
    examples, rest = worked(rows[:EXAMPLES]), rows[EXAMPLES:]
    asked = [f"Question: {row['question']}\nAnswer:" for row in rest[:problems]]
    many = dict(num_samples=8, max_new_tokens=tokens, temperature=0.7, ignore_eos=True)
    one = dict(num_samples=1, max_new_tokens=tokens // 2, temperature=0.7, ignore_eos=True)

    def evaluation(engine: csd.Engine) -> Iterator[csd.Samples]:
        yield from engine.generate([examples + text for text in asked], seed=0, **many)

    def chat(engine: csd.Engine) -> Iterator[csd.Samples]:
        # token ids, since a text that is tokenized again may have other tokens
        text: list[int] = []
        for turn, row in enumerate(rest[:TURNS]):
            turn = f"User: {row['question']}\nAssistant:"
            text = text + engine.tokenizer(turn)["input_ids"]
            out = engine.generate(text, seed=turn, **one)
            text = text + out[0].tokens
            yield out

    def equal(engine: csd.Engine) -> Iterator[csd.Samples]:
        for seed in (0, 1):
            yield from engine.generate(asked[: problems // 2], seed=seed, **many)

    def nothing(engine: csd.Engine) -> Iterator[csd.Samples]:
        texts = [row["question"] + " " + row["answer"] for row in rest]
        ids = [engine.tokenizer(text)["input_ids"] for text in texts]
        joined = [[*chain(*ids[i : i + 3])][:400] for i in range(0, 3 * problems, 3)]
        few = many | dict(num_samples=2, max_new_tokens=8)
        yield from engine.generate(joined, seed=0, **few)

    return {
        "evaluation": evaluation,
        "chat": chat,
        "equal prompts": equal,
        "nothing shared": nothing,
    }


def seen_before(prompts: list[list[int]]) -> int:
    """Tokens that an earlier prompt begins with too, the last one of each prompt left out."""
    known: set[tuple[int, ...]] = set()
    count = 0
    for prompt in prompts:
        beginnings = [tuple(prompt[: i + 1]) for i in range(len(prompt) - 1)]
        count += sum(beginning in known for beginning in beginnings)
        known.update(beginnings)
    return count


def run(engine: csd.Engine, job: Job) -> tuple[float, list[csd.Samples]]:
    engine.release()
    start = time.process_time()
    outs = [*job(engine)]
    return time.process_time() - start, outs


def read(outs: list[csd.Samples]) -> int:
    return sum(len(out.prompt_ids) - 1 - out.stats.cached_tokens for out in outs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: question and answer")
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of jobs")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = args.data.read_text().splitlines()[: EXAMPLES + 3 * args.problems]
    model = args.model or smollm2_path()
    sides = {
        on: csd.Engine(model, **({} if on else {"prefix_cache": False})) for on in (True, False)
    }
    rows = []
    for name, job in jobs(
        sides[True], [*map(json.loads, lines)], args.problems, args.tokens
    ).items():
        if args.only and name not in args.only:
            continue
        took: dict[bool, list[float]] = {True: [], False: []}
        for i in range(args.rounds + 1):
            outs = {}
            for on in sorted(sides, reverse=i % 2 == 0):
                seconds, outs[on] = run(sides[on], job)
                # warm-up: the first round compiles and measures
                if i:
                    took[on].append(seconds)
            same = [(out.tokens, out.logprobs) for out in outs[True]]
            assert same == [(out.tokens, out.logprobs) for out in outs[False]]
        prompts = [out.prompt_ids for out in outs[True]]
        total, now = read(outs[False]), read(outs[True])
        fewest = total - seen_before(prompts)
        rows.append(
            {
                "job": name,
                "prompts": len(prompts),
                "read without": total,
                "read with": now,
                "again": (now - fewest) / now,
                "seconds without": statistics.median(took[False]),
                "seconds with": statistics.median(took[True]),
                "speed-up": statistics.median(
                    a / b for a, b in zip(took[False], took[True], strict=True)
                ),
            }
        )
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    settings = {"problems": args.problems, "tokens": args.tokens, "rounds": args.rounds}
    finish({"bench": "prefix", "exact": sides[True].exact, **settings, "rows": rows}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
