"""Step-level Best-of-N against Best-of-N and a majority vote, at equal tokens.

    python -m bench best_of_steps [--scorers ..] [--minutes 20] [--json F]

The search of `examples/best_of_steps.py` on sums in words: a scorer keeps KEPT texts, which
continue by WIDTH next sentences each. Its tokens are those that it draws and those that the scorer
reads. The others take plain samples of the same problem in their order while their tokens fit into
the search's, for Best-of-N with those that the scorer reads; at most SAMPLES. Scorers:

logprob  mean log-probability of a sampled token, which reads nothing
judge    the model's own probability of Yes, after the text and a question; what the prefix cache
         has is not read
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import csd
from bench.lib.common import finish, interval, table
from csd.evaluate.answers.equality import canonical
from csd.evaluate.answers.extract import last_number
from csd.models.demo import smollm2_path

KEPT, WIDTH, STEPS = 2, 4, 8
# plain samples of a problem, and the most tokens of a text
SAMPLES, TOKENS = 16, 80
SUMS: list[tuple[str, Callable[[int, int], int]]] = [
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have?", lambda a, b: a + b),
    ("{n} has {a} boxes with {b} {t} in each. How many {t} are there in all?", lambda a, b: a * b),
]
ASKED = (
    "<|im_end|>\n<|im_start|>user\nIs this right so far? Answer Yes or No.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def problems(count: int) -> list[tuple[list[dict], str]]:
    """Prompts and their right answers."""
    rng, rows = random.Random(0), []
    for i in range(count):
        text, right = SUMS[i % len(SUMS)]
        a, b = rng.randint(3, 12), rng.randint(2, 9)
        names = dict(n=rng.choice(["Tom", "Anna", "Ben", "Maria", "Sam", "Lena"]))
        names |= dict(t=rng.choice(["apples", "books", "pens", "coins", "stones", "cards"]))
        content = text.format(a=a, b=b, **names)
        rows.append(([{"role": "user", "content": content}], str(right(a, b))))
    return rows


@dataclass(slots=True)
class Scored:
    """Text of a sample or branch, with what a scorer needs of it."""

    ids: list[int]  # with the prompt
    logprobs: list[float]
    text: str

    @property
    def answer(self) -> str | None:
        found = last_number(self.text)
        return None if found is None else canonical(found)


class Judge:
    """Probability of Yes after each text, and the number of tokens read and drawn for it."""

    def __init__(self, engine: csd.Engine):
        self.engine = engine
        encode: Any = engine.tokenizer.encode
        self.asked = encode(ASKED, add_special_tokens=False)
        self.words = [encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]

    def __call__(self, texts: Sequence[Scored]) -> tuple[list[float], int]:
        prompts = [[*text.ids, *self.asked] for text in texts]
        outs: Any = self.engine.generate(
            prompts, num_samples=1, max_new_tokens=1, seed=0, allowed_token_ids=self.words
        )
        scores, tokens = [], 0
        for out in outs:
            (sample,) = out.samples
            chance = math.exp(sample.logprobs[0])
            scores.append(chance if sample.tokens[0] == self.words[0] else 1 - chance)
            tokens += len(out.prompt_ids) - out.stats.cached_tokens
        return scores, tokens


def by_logprob(texts: Sequence[Scored]) -> tuple[list[float], int]:
    return [sum(x.logprobs) / max(len(x.logprobs), 1) for x in texts], 0


def search(engine: csd.Engine, prompt: list[dict], scorer: Callable, heat: float) -> dict:
    """The step-level search: its answer, and its tokens."""
    session = engine.session(prompt, num_samples=KEPT * WIDTH, seed=0)

    def scored(branch: Any) -> Scored:
        own = [x for x in branch.logprobs if x is not None]
        return Scored(branch.prompt, own, branch.text)

    branches, done, drawn, read = session.branches, [], 0, 0
    best: list[tuple[float, Any]] = []
    for _ in range(STEPS):
        room = TOKENS - max(len(branch.tokens) for branch in branches)
        if room <= 0:
            break
        lines = session.sample(branches, stop=["\n", "."], max_new_tokens=room, temperature=heat)
        drawn += sum(len(line.tokens) for line in lines)
        scores, tokens = scorer([scored(branch) for branch in branches])
        read += tokens
        pairs = list(zip(scores, branches, lines, strict=True))
        going = [(x, b) for x, b, line in pairs if line.stop_reason in ("\n", ".")]
        done += [(x, b) for x, b, line in pairs if line.stop_reason not in ("\n", ".")]
        best = sorted(going, key=lambda pair: pair[0])[-KEPT:]
        if not best:
            break
        branches = [child for _, branch in best for child in branch.fork(WIDTH)]
    winner = max(done or best, key=lambda pair: pair[0])[1]
    again = session.read_tokens
    return dict(answer=scored(winner).answer, drawn=drawn, read=read, read_again=again)


def fitting(costs: list[int], tokens: int) -> int:
    """Number of samples that fit, at least one."""
    return max(1, sum(total <= tokens for total in accumulate(costs)))


def row_of(
    engine: csd.Engine, prompt: list[dict], right: str, out: Any, name: str, heat: float
) -> dict:
    """Right or wrong of each arm on a problem, and the tokens of each."""
    scorer: Callable = Judge(engine) if name == "judge" else by_logprob
    plain = [Scored([*out.prompt_ids, *s.tokens], s.logprobs, s.text) for s in out.samples]
    lengths = [len(sample.tokens) for sample in out.samples]
    found = search(engine, prompt, scorer, heat)
    tokens = found["drawn"] + found["read"]
    scores, read = scorer(plain)
    each = [n + read // len(plain) for n in lengths]
    votes, compared = fitting(lengths, tokens), fitting(each, tokens)
    best = max(range(compared), key=scores.__getitem__)
    return {
        "pass@1": sum(x.answer == right for x in plain) / len(plain),
        "steps": found["answer"] == right,
        "best_of_n": plain[best].answer == right,
        "vote": csd.vote(out.samples[:votes], "number", limited=True).answer == right,
        "tokens": tokens,
        "best_of_n_tokens": sum(each[:compared]),
        "vote_tokens": sum(lengths[:votes]),
        "best_of_n_samples": compared,
        "vote_samples": votes,
    } | {key: found[key] for key in ("drawn", "read", "read_again")}


def summary(rows: list[dict], scorer: str) -> list[dict]:
    """A row for each arm: accuracy, the search's lead over it, and tokens of a problem."""
    out = []
    for arm in ("steps", "best_of_n", "vote"):

        def mean(key: str) -> float:
            return sum(row[key] for row in rows) / len(rows)

        def accuracy(chosen: list[int], arm: str = arm) -> float:
            return sum(rows[i][arm] for i in chosen) / len(chosen)

        def lead(chosen: list[int], arm: str = arm) -> float:
            return sum(rows[i]["steps"] - rows[i][arm] for i in chosen) / len(chosen)

        line: dict[str, Any] = {"scorer": scorer, "problems": len(rows), "pass@1": mean("pass@1")}
        line |= {"arm": arm, "accuracy": mean(arm), "interval": interval(accuracy, len(rows))}
        if arm == "steps":
            line |= {key: mean(key) for key in ("tokens", "drawn", "read", "read_again")}
        else:
            line |= {"tokens": mean(f"{arm}_tokens"), "samples": mean(f"{arm}_samples")}
            line |= {"lead": mean("steps") - mean(arm), "lead_interval": interval(lead, len(rows))}
        out.append(line)
    return out


def measured(scorer: str, rows: list[dict], args: argparse.Namespace) -> list[dict]:
    """`rows` and those of the next problems that --minutes have time for."""
    end, rows, heat = time.monotonic() + 60 * args.minutes, [*rows], args.temperature
    todo = problems(args.problems)
    with csd.Engine(str(smollm2_path()), dtype=args.dtype) as engine:
        for start in range(len(rows), len(todo), 4):
            if time.monotonic() > end:
                break
            part = todo[start : start + 4]
            options = dict(num_samples=SAMPLES, max_new_tokens=TOKENS, temperature=heat, seed=1)
            outs: Any = engine.generate([prompt for prompt, _ in part], **options)
            for (prompt, right), out in zip(part, outs, strict=True):
                rows.append(row_of(engine, prompt, right, out, scorer, heat))
                print(scorer, len(rows), rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scorers", nargs="*", default=["logprob", "judge"])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="of a scorer at most")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--json", help="an existing file's rows are kept, and a run continues after them"
    )
    args = parser.parse_args(argv)
    rows: dict[str, list[dict]] = {}
    if args.json and Path(args.json).exists():
        rows |= json.loads(Path(args.json).read_text())["rows"]
    rows |= {scorer: measured(scorer, rows.get(scorer, []), args) for scorer in args.scorers}
    arms = [line for scorer, own in rows.items() for line in summary(own, scorer)]
    print(table(arms))
    settings = {"temperature": args.temperature, "dtype": args.dtype, "kept": KEPT, "width": WIDTH}
    settings |= {"plain_samples": SAMPLES, "tokens_at_most": TOKENS}
    result = {"bench": "best_of_steps", "settings": settings, "arms": arms, "rows": rows}
    finish(result, args.json)


if __name__ == "__main__":
    main()
