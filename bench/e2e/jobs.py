"""Four jobs by csd, llama.cpp and vLLM: README's table, measured and written.

    python -m bench jobs [MODEL] [--vllm .venv-vllm/bin/python] [--pairs 7] [--only JOB ...]
        [--json F]
    python -m bench jobs --write

    vote         8 short answers to a word problem, with the model's own settings
    pass@k       16 completions of one function at temperature 0.2 and top_p 0.95
    evaluation   8 worked examples before each of 4 problems, 8 answers of 60 tokens to each at
                 temperature 0.7
    chat         one answer to each of 4 messages of a chat, with the model's own settings

MODEL is the 1.5B of `python -m bench models` if not given. csd and llama.cpp take the file as it
is; vLLM, which has no kernels for a GGUF file on a CPU, takes its numbers in --vllm-dtype. Each
side keeps prompts in its own prefix cache, which a run begins empty, and draws all samples of a
call at once. A pair is one run of every side, alone on the machine, in the opposite order in every
other pair; the runs of a pair have one prompt, those of other pairs other ones. Figures are tokens
per second of the wall, medians of the pairs; "times" is the median of the pairs' ratios to the
fastest other side, with its range. A job already in the file is kept, so that a run can go on.
--write writes README's table from bench/results/jobs.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import csd
from bench.e2e.long.prompts import ITEMS
from bench.e2e.long.sides import ends_of
from bench.e2e.long.vllm_side import Vllm, as_folder
from bench.lib.common import finish, machine, markdown, table, write
from bench.lib.llama_cpp import LlamaCpp
from bench.lib.models import ids_of, path_of
from bench.lib.settings import PLAIN, settings_of, words

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench/results/jobs.json"
BEGIN, END = "<!-- python -m bench jobs -->", "<!-- /bench jobs -->"
CSD, LLAMA, VLLM = "csd", "llama.cpp", "vLLM"
SLOTS, CELLS, LENGTH = 32, 12288, 4096
# tokens of a sample while a side warms up
WARM = 12
VOTE = "{} Explain in at most three sentences, then give the answer."
FUNCTION = "Complete this Python function. Answer with the whole function only.\n\n```python\n{}```"
CHAT = (
    "{}",
    "Add type hints and a docstring. Give the whole function.",
    "Raise a ValueError for arguments of a wrong kind. Give the whole function.",
    "Write three tests of it with pytest.",
)
# settings of jobs that do not have the model's own
SETTINGS = {"pass@k": PLAIN | {"temperature": 0.2, "top_p": 0.95}, "evaluation": PLAIN}
# of each job: what README's table calls it, samples of a prompt, most tokens of a sample
JOBS = {
    "vote": ("a vote: 8 answers of a few sentences to a word problem", 8, 400),
    "pass@k": ("pass@k: 16 completions of a function at temperature 0.2", 16, 250),
    "evaluation": ("few-shot evaluation: 4 problems x 8 answers of 60 tokens", 8, 60),
    "chat": ("a chat: one answer at a time, 4 turns of at most 100 tokens", 1, 100),
}


class Csd:
    """csd's engine. draw: as of every side, tokens by prompt and sample, and the seconds."""

    def __init__(self, path: str):
        self.engine = csd.Engine(path, max_slots=SLOTS)

    def begin(self) -> None:
        """Empty the prefix cache."""
        self.engine.release()

    def draw(
        self, prompts: list[list[int]], n: int, tokens: int, seed: int, settings: dict, whole: bool
    ) -> tuple[list[list[list[int]]], float]:
        start = time.perf_counter()
        outs = self.engine.generate(
            prompts,
            num_samples=n,
            max_new_tokens=tokens,
            seed=seed,
            ignore_eos=whole,
            progress=False,
            **settings,
        )
        seconds = time.perf_counter() - start
        return [[list(x) for x in out.tokens] for out in outs], seconds


class Llama:
    """llama.cpp on the file itself."""

    def __init__(self, path: str):
        self.lib = LlamaCpp(path, SLOTS, CELLS)
        self.begin = self.lib.clear

    def draw(
        self, prompts: list[list[int]], n: int, tokens: int, seed: int, settings: dict, whole: bool
    ) -> tuple[list[list[list[int]]], float]:
        start = time.perf_counter()
        drawn = self.lib.call(prompts, n, tokens, seed, ignore_eos=whole, settings=settings)
        return drawn, time.perf_counter() - start


class Other:
    """vLLM's CPU build, whose own generator goes on from call to call."""

    def __init__(self, python: str, folder: str, dtype: torch.dtype, ends: set[int]):
        self.vllm = Vllm(python, folder, dtype, ends, LENGTH, SLOTS)
        self.clear = True

    def begin(self) -> None:
        self.clear = True

    def draw(
        self, prompts: list[list[int]], n: int, tokens: int, seed: int, settings: dict, whole: bool
    ) -> tuple[list[list[list[int]]], float]:
        out = self.vllm.call(prompts, n, tokens, whole, self.clear, settings)
        self.clear = False
        return out["samples"], out["seconds"]


def lines(name: str) -> list[dict]:
    text = (ROOT / "bench/prompts" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def calls(job: str, turn: int, tokenizer: Any) -> Iterator[list[list[int]]]:
    """Prompts of each call of a job's run; the tokens of a chat's answer are sent in between."""
    if job == "vote":
        asked = ITEMS["worked problems"]()
        yield [ids_of(tokenizer, VOTE.format(asked[turn % len(asked)]))]
    elif job == "pass@k":
        signatures = lines("signatures.jsonl")
        yield [ids_of(tokenizer, FUNCTION.format(signatures[turn % len(signatures)]["prompt"]))]
    elif job == "evaluation":
        rows = lines("examples.jsonl")
        shots = "".join(f"Question: {r['question']}\nAnswer: {r['answer']}\n\n" for r in rows)
        asked = ITEMS["worked problems"]()
        items = [asked[(4 * turn + i) % len(asked)] for i in range(4)]
        yield [tokenizer(f"{shots}Question: {item}\nAnswer:")["input_ids"] for item in items]
    else:
        tasks = [row["prompt"] for row in lines("code.jsonl")]
        messages: list[dict] = []
        for text in CHAT:
            messages.append({"role": "user", "content": text.format(tasks[turn % len(tasks)])})
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)
            answer = yield [ids]
            text = tokenizer.decode(answer, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})


def run(
    side: Any, job: str, turn: int, tokenizer: Any, own: dict, most: int | None = None
) -> tuple[list[int], float]:
    """Lengths of the samples drawn in one run of a job, and its seconds.

    own: the model's settings. most: tokens of a sample, in place of the job's.
    """
    _, n, tokens = JOBS[job]
    tokens = most or tokens
    side.begin()
    work, lengths, seconds = calls(job, turn, tokenizer), [], 0.0
    prompts = next(work)
    while True:
        samples, spent = side.draw(
            prompts, n, tokens, turn, SETTINGS.get(job, own), job == "evaluation"
        )
        lengths += [len(sample) for of in samples for sample in of]
        seconds += spent
        try:
            prompts = work.send(samples[0][0])
        except StopIteration:
            return lengths, seconds


def measure(
    job: str, sides: dict[str, Any], pairs: dict[str, int], tokenizer: Any, own: dict
) -> dict:
    """A job's row: the sides in turn. pairs: those of each side. ended: samples below the limit."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {name: [] for name in sides}
    ended: dict[str, list[int]] = {name: [] for name in sides}
    for side in sides.values():
        run(side, job, 0, tokenizer, own, most=WARM)
    for pair in range(max(pairs.values())):
        for name in [name for name in sides if pair < pairs[name]][:: -1 if pair % 2 else 1]:
            lengths, spent = run(sides[name], job, pair + 1, tokenizer, own)
            print(f"{job} {pair} {name}: {sum(lengths)} tokens in {spent:.1f} s", flush=True)
            tokens[name].append(sum(lengths))
            ended[name].append(sum(length < JOBS[job][2] for length in lengths))
            seconds[name].append(round(spent, 3))
    settings = SETTINGS.get(job, own)
    row = {"job": job, "settings": settings, "tokens": tokens, "ended": ended, "seconds": seconds}
    # rows may be measured apart
    return row | {"commit": machine()["commit"]}


def figures(row: dict) -> dict[str, Any]:
    """Tokens per second by side, the fastest other side, and csd's ratio to it with its range."""
    rates = {
        name: [t / s for t, s in zip(row["tokens"][name], seconds, strict=True)]
        for name, seconds in row["seconds"].items()
    }
    found: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in rates if name != CSD), key=lambda name: found[name])
    # the fastest other side may have fewer pairs
    ratios = [a / b for a, b in zip(rates[CSD], rates[best], strict=False)]
    times = {"fastest other": best, "times": statistics.median(ratios)}
    return found | times | {"low": min(ratios), "high": max(ratios), "pairs": len(ratios)}


def block(result: dict) -> str:
    """README's table, with its markers."""
    others = [x for x in (LLAMA, VLLM) if any(x in row["seconds"] for row in result["rows"])]
    head = ["tokens per second", CSD, *others, "times as fast", "pairs of runs"]
    rows = []
    for row in result["rows"]:
        f = figures(row)
        rates = [f"{f[name]:.0f}" if name in f else "not run" for name in others]
        times = f"**{f['times']:.1f}**"
        if f["pairs"] > 1:
            times += f" ({f['low']:.1f} to {f['high']:.1f})"
        rows.append([JOBS[row["job"]][0], f"**{f[CSD]:.0f}**", *rates, times, str(f["pairs"])])
    return "\n\n".join([BEGIN, markdown(head, rows), _text(result), END])


def _text(result: dict) -> str:
    here, rows = result["machine"], result["rows"]
    vllm = ""
    if "vLLM" in result:
        least = min(len(row["seconds"][VLLM]) for row in rows if VLLM in row["seconds"])
        runs = f"{least} run" + "s" * (least > 1)
        vllm = f", vLLM {result['vLLM']} on its numbers in {result['vllm_dtype']} ({runs} a job)"
    kinds = " and ".join(x for x in ("avx512_vnni", "avx2") if x in here["instructions"])
    return (
        f"{result['model'].removesuffix('.gguf')}, csd and llama.cpp on the file{vllm}, on "
        f"{here['cores']} cores of {here['cpu']} with {kinds}. The vote and the chat have the "
        "model's own settings "
        f'({words(rows[0]["settings"])}). Speeds are medians over runs; "times as fast" is the '
        "median (range) over pairs of csd / the fastest other. Each pair has a prompt of its own."
    )


def update(result: dict, readme: Path) -> None:
    """Write README's block between its markers."""
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(before + block(result) + rest.split(END)[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="coder-1.5b", help="a GGUF file or its name")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--vllm-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--vllm-pairs", type=int, help="fewer pairs for vLLM")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=[*JOBS], metavar="JOB")
    parser.add_argument("--write", action="store_true", help="write README from the file")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    if args.write:
        update(json.loads(args.json.read_text()), ROOT / "README.md")
        return
    path = path_of(args.model)
    rows = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
    head = {"bench": "jobs", "model": Path(path).name, "vllm_dtype": args.vllm_dtype}
    with ExitStack() as stack:
        sides: dict[str, Any] = {CSD: Csd(path), LLAMA: Llama(path)}
        engine = sides[CSD].engine
        if args.vllm:
            to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            dtype = getattr(torch, args.vllm_dtype)
            folder = as_folder(path, dtype, engine.tokenizer, to)
            sides[VLLM] = Other(args.vllm, folder, dtype, ends_of(engine))
            stack.callback(sides[VLLM].vllm.close)
            head["vLLM"] = sides[VLLM].vllm.version
        pairs = dict.fromkeys(sides, args.pairs)
        if args.vllm and args.vllm_pairs:
            pairs[VLLM] = args.vllm_pairs
        own = settings_of(engine.generation_config)
        for job in args.only:
            row = measure(job, sides, pairs, engine.tokenizer, own)
            rows = [old for old in rows if old["job"] != job] + [row]
            rows.sort(key=lambda row: [*JOBS].index(row["job"]))
            write(head | {"rows": rows}, args.json)
    print(table([{"job": row["job"]} | figures(row) for row in rows]))
    finish(head | {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
