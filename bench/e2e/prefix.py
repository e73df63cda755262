"""Prompts that begin alike: seconds and tokens read with the prefix cache and without.

    python -m bench prefix --data gsm8k_test.jsonl [MODEL] [--vllm .venv-vllm/bin/python]
        [--problems 64] [--tokens 100] [--rounds 2] [--json F]

SmolLM2-135M when no model is given. The data are JSON lines with `question` and `answer`: the first
8 are the worked examples of every prompt, and the next are the problems.

    evaluation      8 worked examples and a problem, in one call
    chat            6 turns, in each of which the prompt is the whole chat so far
    equal prompts   a training step's prompts, drawn twice with two seeds
    nothing shared  problems only, of about 400 tokens each, with few tokens to draw

The sides run in turn on one thread and begin each round with empty caches. "speed-up" is the median
over rounds of the seconds without the cache divided by those with it, in CPU seconds of the
process; "over vLLM" the same for vLLM's CPU build with its own prefix cache. "read" are tokens of
prompts that the model has read, "again" those that an earlier prompt of the round begins with too,
as a share of the tokens of all prompts. Tokens and log-probabilities with the cache must equal
those without.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import csd
from bench.e2e.long.vllm_side import Vllm, as_folder
from bench.lib.common import finish, table, write
from bench.lib.models import path_of
from bench.lib.settings import PLAIN

EXAMPLES, TURNS, SLOTS = 8, 6, 64


@dataclass(slots=True)
class Answer:
    """Samples of one prompt: tokens and log-probabilities of each, and tokens not read."""

    prompt: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: int


# draws num_samples samples of max_new_tokens tokens for each prompt: (prompts, seed, samples,
# tokens); a job runs over it and returns the answers of all its calls
Draw = Callable[[list[list[int]], int, int, int], list[Answer]]
Job = Callable[[Draw], list[Answer]]


class Csd:
    """csd's engine, with its prefix cache or without."""

    def __init__(self, model: Any, cache: bool):
        options = {} if cache else {"prefix_cache": False}
        self.engine = csd.Engine(model, max_slots=SLOTS, **options)

    def draw(self, prompts: list[list[int]], seed: int, samples: int, tokens: int) -> list[Answer]:
        outs = self.engine.generate(
            prompts,
            seed=seed,
            num_samples=samples,
            max_new_tokens=tokens,
            **PLAIN,
            ignore_eos=True,
            progress=False,
        )
        return [Answer(o.prompt_ids, o.tokens, o.logprobs, o.stats.cached_tokens) for o in outs]

    def run(self, job: Job) -> tuple[float, list[Answer]]:
        """CPU seconds and answers of a job that begins with empty caches."""
        self.engine.release()
        start = time.process_time()
        answers = job(self.draw)
        return time.process_time() - start, answers


class Other:
    """vLLM's CPU build with its prefix cache."""

    def __init__(self, python: str, engine: csd.Engine, path: str, length: int, folder: Path):
        model = as_folder(path, engine.dtype, engine.tokenizer, folder)
        self.vllm = Vllm(python, model, engine.dtype, set(), length, SLOTS)
        self.spent, self.clear = 0.0, True

    def draw(self, prompts: list[list[int]], seed: int, samples: int, tokens: int) -> list[Answer]:
        out = self.vllm.call(prompts, samples, tokens, ignore_eos=True, clear=self.clear)
        self.clear = False
        self.spent += out["processor"]
        pairs = zip(prompts, out["samples"], strict=True)
        return [Answer(ids, drawn, [], 0) for ids, drawn in pairs]

    def run(self, job: Job) -> tuple[float, list[Answer]]:
        self.spent, self.clear = 0.0, True
        answers = job(self.draw)
        return self.spent, answers


def worked(rows: list[dict]) -> str:
    return "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows)


def jobs(tokenizer: Any, rows: list[dict], problems: int, tokens: int) -> dict[str, Job]:
    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    examples, rest = worked(rows[:EXAMPLES]), rows[EXAMPLES:]
    asked = [f"Question: {row['question']}\nAnswer:" for row in rest[:problems]]

    def evaluation(draw: Draw) -> list[Answer]:
        return draw([ids(examples + text) for text in asked], 0, 8, tokens)

    def chat(draw: Draw) -> list[Answer]:
        # token ids, since a text that is tokenized again may have other tokens
        text: list[int] = []
        answers: list[Answer] = []
        for turn, row in enumerate(rest[:TURNS]):
            text = text + ids(f"User: {row['question']}\nAssistant:")
            (answer,) = draw([text], turn, 1, tokens // 2)
            text = text + answer.tokens[0]
            answers.append(answer)
        return answers

    def equal(draw: Draw) -> list[Answer]:
        prompts = [ids(text) for text in asked[: problems // 2]]
        return [answer for seed in (0, 1) for answer in draw(prompts, seed, 8, tokens)]

    def nothing(draw: Draw) -> list[Answer]:
        texts = [ids(row["question"] + " " + row["answer"]) for row in rest]
        joined = [[*chain(*texts[i : i + 3])][:400] for i in range(0, 3 * problems, 3)]
        return draw(joined, 0, 2, 8)

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


def read(answers: list[Answer]) -> int:
    return sum(len(answer.prompt) - 1 - answer.cached for answer in answers)


def timed(sides: dict[str, Csd | Other], job: Job, rounds: int) -> dict[str, Any]:
    """A job's row: the sides in turn, in the opposite order in every other round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[Answer]] = {}
    for i in range(rounds + 1):
        for name in [*sides][:: (-1) ** i]:
            spent, answers[name] = sides[name].run(job)
            # warm-up: the first round compiles and measures
            if i:
                seconds[name].append(spent)
        with_cache, without = ([(a.tokens, a.logprobs) for a in answers[n]] for n in CSD)
        if with_cache != without:
            raise AssertionError("tokens or log-probabilities with the cache differ")
    total, now = read(answers["without"]), read(answers["with"])
    fewest = total - seen_before([answer.prompt for answer in answers["with"]])
    row: dict[str, Any] = {"prompts": len(answers["with"])}
    # vLLM counts the cached tokens of one sample of a prompt, so what it reads is not known
    row |= {f"read {name}": read(answers[name]) for name in CSD}
    row["again"] = (now - fewest) / total
    row |= {f"seconds {name}": statistics.median(seconds[name]) for name in sides}

    def ratio(name: str) -> float:
        pairs = zip(seconds[name], seconds["with"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    row["speed-up"] = ratio("without")
    if "vLLM" in sides:
        row["over vLLM"] = ratio("vLLM")
    return row


CSD = ("with", "without")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as of csd.generate")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: question and answer")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of jobs")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = args.data.read_text().splitlines()[: EXAMPLES + 3 * args.problems]
    model = path_of(args.model)
    sides: dict[str, Csd | Other] = {name: Csd(model, cache=name == "with") for name in CSD}
    engine = sides["with"].engine
    named = jobs(engine.tokenizer, [*map(json.loads, lines)], args.problems, args.tokens)
    settings = {"problems": args.problems, "tokens": args.tokens, "rounds": args.rounds}
    result: dict[str, Any] = {"bench": "prefix", "exact": engine.exact, **settings, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        if args.vllm:
            sides["vLLM"] = Other(args.vllm, engine, str(model), 4096, Path(folder))
            result["vLLM"] = sides["vLLM"].vllm.version
        for name, job in named.items():
            if args.only and name not in args.only:
                continue
            row = {"job": name, **timed(sides, job, args.rounds)}
            print(table([row]), flush=True)
            result["rows"].append(row)
            write(result, args.json)
        if args.vllm:
            sides["vLLM"].vllm.close()
    print(table(result["rows"]))
    finish(result, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
