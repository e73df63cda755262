"""Speed of samples whose equal texts share rows of the model, against rows of their own.

    python -m bench shared_rows [MODEL] [--cases 16@0.2 8@0.7 8@1.0 8x1@0.7] [--pairs 10]
        [--tokens 150] [--vllm .venv-vllm/bin/python] [--peer-pairs 4] [--json F]

A case N@T draws N samples of a prompt at temperature T, and PxN@T of P prompts at once, N of each:
with N = 1 nothing can be shared. The prompts ask to complete ten functions of our own
(bench/prompts/signatures.jsonl), in the form of HumanEval, a pair of runs for each. top_p is 0.95,
as by convention for pass@k of code, without other filters, for every side. csd draws with shared
rows and without them; "equal samples" counts those that both sides drew alike. With --vllm vLLM's
CPU build draws the first case, plain and with n-grams, for the first --peer-pairs prompts. Sides
alternate, in the opposite order in every other pair. "rows / token" is rows of the model per drawn
token, "MB" the median of what the resident set rises by at most in a call, "csd / it" the median of
the pairs' ratios with its bootstrap interval.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import csd
from bench.e2e.long.sides import ends_of
from bench.e2e.long.vllm_side import Vllm, open_sides
from bench.lib.common import finish, ratio, table
from bench.lib.models import HELP, ids_of, path_of
from bench.lib.resident import reset_peak, resident
from bench.lib.settings import PLAIN
from csd.models.load import load

PROMPTS = Path(__file__).parents[1] / "prompts/signatures.jsonl"
ASK = "Complete this Python function. Answer with the whole function only.\n\n```python\n{}```"
SHARED, OWN = "csd", "csd, a row for each sample"
TOP_P = 0.95


@dataclass(frozen=True)
class Case:
    """`samples` of each of `prompts` prompts at a time, at a temperature."""

    prompts: int
    samples: int
    temperature: float

    @classmethod
    def of(cls, text: str) -> "Case":
        count, temperature = text.split("@")
        prompts, _, samples = count.rpartition("x")
        return cls(int(prompts or 1), int(samples), float(temperature))

    def __str__(self) -> str:
        of = f"{self.prompts} x " if self.prompts > 1 else ""
        return f"{of}N={self.samples} at {self.temperature:g}"

    @property
    def settings(self) -> dict:
        return PLAIN | {"temperature": self.temperature, "top_p": TOP_P}


@dataclass(frozen=True)
class Run:
    """One call of a side. samples: tokens by prompt and sample."""

    samples: list[list[list[int]]]
    seconds: float
    rows: int | None = None
    gain: float | None = None
    memory: int | None = None  # bytes by which the resident set rose at most

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for samples in self.samples for tokens in samples)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=HELP)
    parser.add_argument(
        "--cases",
        type=Case.of,
        nargs="+",
        default=[Case.of(c) for c in ("16@0.2", "8@0.7", "8@1.0", "8x1@0.7")],
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--peer-pairs", type=int, default=4)
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    path = path_of(args.model)
    loaded = load(path, device="cpu")
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    prompts = [ids_of(loaded.tokenizer, ASK.format(text)) for text in texts]
    head = {"bench": "shared_rows", "model": Path(path).name, "tokens": args.tokens}
    head |= {"dtype": str(loaded.dtype).removeprefix("torch."), "pairs": args.pairs}
    rows = []
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(csd.Engine(loaded, share_rows=shares))
            for name, shares in ((SHARED, True), (OWN, False))
        }
        peers: dict[str, Vllm] = {}
        if args.vllm:
            length = max(map(len, prompts)) + args.tokens + 64
            most = max(c.prompts * c.samples for c in args.cases[:1])
            ends = ends_of(engines[SHARED])
            peers = open_sides(args.vllm, path, loaded, length, most, ends, stack)
        for case in args.cases:
            rows += measure(case, engines, peers, prompts, args)
            peers = {}
            print(table(rows), flush=True)
    finish(head | {"settings": {"top_p": TOP_P}, "rows": rows}, args.json)


def draw(engine: csd.Engine, ids: list[list[int]], case: Case, tokens: int, seed: int) -> Run:
    how = dict(num_samples=case.samples, max_new_tokens=tokens, seed=seed, progress=False)
    reset_peak()
    before, start = resident(), time.perf_counter()
    outs = engine.generate(ids, **how, **case.settings)
    seconds, memory = time.perf_counter() - start, resident(peak=True) - before
    samples = [[list(sample.tokens) for sample in out] for out in outs]
    rows = sum(out.stats.rows for out in outs)
    return Run(samples, seconds, rows, outs[0].stats.draft_gain, memory)


def ask(peer: Vllm, ids: list[list[int]], case: Case, tokens: int) -> Run:
    answer = peer.call(ids, case.samples, tokens, settings=case.settings)
    return Run(answer["samples"], answer["seconds"])


def measure(
    case: Case,
    engines: dict[str, csd.Engine],
    peers: dict[str, Vllm],
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> list[dict]:
    """Returns a row for each side."""
    runs: dict[str, list[Run]] = {name: [] for name in (*engines, *peers)}
    # the first round compiles and measures
    for i in range(-1, args.pairs):
        ids = [prompts[(i + k) % len(prompts)] for k in range(case.prompts)]
        names = [*engines, *(peers if i < args.peer_pairs else ())]
        for name in names if i % 2 else names[::-1]:
            if name in engines:
                run = draw(engines[name], ids, case, args.tokens, max(i, 0))
            else:
                run = ask(peers[name], ids, case, args.tokens)
            if i >= 0:
                runs[name].append(run)
    first = runs[SHARED]
    rows = []
    for name, of in runs.items():
        row = {"case": str(case), "side": name, "pairs": len(of)}
        row["tok/s"] = statistics.median(run.rate for run in of)
        row["seconds"] = statistics.median(run.seconds for run in of)
        if name in engines:
            row["rows / token"] = sum(run.rows for run in of) / sum(run.tokens for run in of)
            row["MB"] = statistics.median(run.memory for run in of) / 1e6
            gains = [run.gain for run in of if run.gain is not None]
            row["drafts gain"] = statistics.median(gains) if gains else None
        if name != SHARED:
            row["csd / it"], row["low"], row["high"] = ratio(
                [run.rate for run in first[: len(of)]], [run.rate for run in of]
            )
        if name == OWN:
            row["equal samples"] = sum(
                a == b
                for x, y in zip(first, of, strict=True)
                for ours, theirs in zip(x.samples, y.samples, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
            row["samples"] = sum(len(s) for run in of for s in run.samples)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
