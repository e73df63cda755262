"""How history fades when it was drawn k optimiser steps before the samples that it drafts for.

    python -m bench.history_steps [--rates 1e-6 1e-5] [--steps 1 4 16] [--prompts 4] [--json F]

SmolLM2-135M in float32 learns as in the GRPO example: every step draws `--samples` completions of
one prompt, the prompts in turn, with the weights of the moment. With r a completion's share of
vowels, mean and deviation over the step's completions, and p the model's probabilities at
temperature 1,

    loss = -mean over completions of [(r - mean) / (deviation + 1e-4) mean over tokens of log p],

AdamW without decay. After k steps live samples are drawn, with the same seed for every k, and
replayed with samples drawn before the first step, and with as many of another seed drawn with the
weights that the live ones have. tau is tokens a sample and step. A result file that exists is
completed: rates that it has stay.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import csd
from bench.common import finish, table
from bench.history_live import PROBLEMS
from bench.replay import tau
from csd.evaluate.replay import replay
from csd.graph.consensus import ConsensusGraph
from csd.graph.history import Earlier
from csd.kernels.ops import reference
from csd.models.demo import smollm2_path
from csd.traces.traces import Trace, read_traces

# seeds of what is live, of what is known, and of the first step
LIVE, KNOWN, LEARN = 1, 2, 100


def load() -> tuple[Any, Any]:
    path = Path(smollm2_path())
    place: dict[str, Any] = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(**place)


def draw(model: Any, tokenizer: Any, seed: int, args: argparse.Namespace) -> list[Trace]:
    """The prompts' samples with the weights of the moment, and the probabilities they had."""
    prompts = [[{"role": "user", "content": p}] for p in PROBLEMS[: args.prompts]]
    with TemporaryDirectory() as folder:
        path = f"{folder}/drawn.jsonl"
        csd.generate(
            model, prompts, tokenizer=tokenizer, seed=seed, num_samples=args.samples,
            max_new_tokens=args.tokens, temperature=args.temperature, budget=32, record=path,
        )  # fmt: skip
        return list(read_traces(path))


def learn(model: Any, optimiser: Any, tokenizer: Any, step: int, args: argparse.Namespace) -> None:
    """One optimiser step."""
    prompt = [{"role": "user", "content": PROBLEMS[step % args.prompts]}]
    out = csd.generate(
        model, prompt, tokenizer=tokenizer, seed=LEARN + step, num_samples=args.samples,
        max_new_tokens=args.tokens, temperature=1.0, budget=32,
    )  # fmt: skip
    rewards = torch.tensor([share_of_vowels(text) for text in out.texts])
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    optimiser.zero_grad()
    for weight, tokens in zip(advantage.tolist(), out.tokens, strict=True):
        ids = torch.tensor([out.prompt_ids + tokens])
        logits = model(ids).logits[0, len(out.prompt_ids) - 1 : -1]
        chosen = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        (-weight * chosen.mean() / len(out)).backward()
    optimiser.step()


def share_of_vowels(text: str) -> float:
    return sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1)


def told(live: list[Trace], known: list[Trace] | None, args: argparse.Namespace) -> float:
    """tau of the live samples, replayed with the others as their history."""
    results = []
    for i, trace in enumerate(live):
        history = [] if known is None else [Earlier.of(s) for s in known[i].samples]
        drafter = ConsensusGraph(reference(), "cpu", history=bool(history))
        results.append(replay(trace, drafter, args.samples, args.nodes, history=history))
    return tau(results)


def same(a: list[Trace], b: list[Trace]) -> float:
    """Share of tokens before the first at which two draws of a sample differ."""
    equal = total = 0
    for s, t in ((s, t) for x, y in zip(a, b, strict=True)
                 for s, t in zip(x.samples, y.samples, strict=True)):  # fmt: skip
        apart = (i for i, (u, v) in enumerate(zip(s, t, strict=False)) if u != v)
        equal += next(apart, min(len(s), len(t)))
        total += len(t)
    return equal / total


def train(rate: float, args: argparse.Namespace) -> list[dict]:
    """A line for each of `--steps`, and one before the first."""
    model, tokenizer = load()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    first, start, rows = draw(model, tokenizer, KNOWN, args), None, []
    for k in range(max(args.steps) + 1):
        if k in (0, *args.steps):
            live = draw(model, tokenizer, LIVE, args)
            start = start or live
            now = draw(model, tokenizer, KNOWN, args) if k else first
            rows.append({
                "rate": rate, "steps": k, "none": told(live, None, args),
                "of step 0": told(live, first, args), "of these weights": told(live, now, args),
                "tokens as at step 0": same(start, live),
            })  # fmt: skip
            print(table(rows[-1:]), flush=True)
        if k < max(args.steps):
            learn(model, optimiser, tokenizer, k, args)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="live, known and of a step")
    parser.add_argument("--tokens", type=int, default=32, help="of a sample at most")
    parser.add_argument("--temperature", type=float, default=0.7, help="of live and known ones")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows: list[dict] = []
    if args.json and Path(args.json).exists():
        rows = json.loads(Path(args.json).read_text())["rows"]
        rows = [r for r in rows if r["rate"] not in args.rates]
    for rate in args.rates:
        start = time.perf_counter()
        rows += train(rate, args)
        print(f"rate {rate:g}: {time.perf_counter() - start:.0f} s", flush=True)
    rows.sort(key=lambda r: (r["rate"], r["steps"]))
    print(table(rows))
    names = ("prompts", "samples", "tokens", "temperature", "nodes")
    options = {name: getattr(args, name) for name in names}
    finish({"bench": "history_steps", **options, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
