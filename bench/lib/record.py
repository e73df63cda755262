r"""Record the traces of `bench/traces/`: SmolLM2's samples of prompts of our own.

    python -m bench record [--seconds 600]
    python -m bench record --prompts bench/prompts/rewrite.jsonl \
        --traces bench/traces/rewrite.jsonl.gz

Draws samples of the prompts in the prompt file (`bench/traces/prompts.jsonl`) that the trace file
(`bench/traces/smollm2.jsonl.gz`) does not have yet, up to 64 samples of one temperature at a time,
and appends them, so the run can be stopped and restarted. Probabilities have four digits; those
that round to 0 are left out.
"""

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path

import torch

import csd
from csd.models.demo import smollm2_path

FOLDER = Path(__file__).parents[1] / "traces"
PROMPTS, TRACES = FOLDER / "prompts.jsonl", FOLDER / "smollm2.jsonl.gz"
SEED = 11
MAX_NEW = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="begin nothing new after so long")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--traces", type=Path, default=TRACES, help="file that they are added to")
    args = parser.parse_args()
    engine = csd.Engine(smollm2_path(), max_slots=64, dtype=torch.float32)
    begun = time.perf_counter()
    for batch in batches(missing(args.prompts, args.traces)):
        start = time.perf_counter()
        if args.seconds is not None and start - begun > args.seconds:
            break
        rows = record(engine, batch)
        with gzip.open(args.traces, "at") as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        tokens = sum(len(s) for row in rows for s in row["samples"])
        names = ", ".join(p["id"] for p in batch)
        print(f"{names}: {tokens} tokens in {time.perf_counter() - start:.0f} s", flush=True)


def missing(prompts_file: Path, traces: Path) -> list[dict]:
    """Returns the prompts that have not been recorded."""
    done = set()
    if traces.exists():
        with gzip.open(traces, "rt") as file:
            done = {json.loads(line)["problem"] for line in file}
    prompts = [json.loads(line) for line in prompts_file.read_text().splitlines()]
    return [p for p in prompts if p["id"] not in done]


def batches(prompts: list[dict]) -> list[list[dict]]:
    """Batches of adjacent prompts with equal temperature and samples, at most 64 samples each."""
    out: list[list[dict]] = []
    for p in prompts:
        last = out[-1] if out else None
        same = last and all(last[0][k] == p[k] for k in ("temperature", "samples"))
        if same and (len(last) + 1) * p["samples"] <= 64:
            last.append(p)
        else:
            out.append([p])
    return out


def record(
    engine: csd.Engine, batch: list[dict], max_new: int = MAX_NEW, digits: int = 4
) -> list[dict]:
    """Rows of a trace file, one per prompt; probabilities are rounded to `digits` digits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.jsonl"
        csd.generate(
            engine,
            [[{"role": "user", "content": p["prompt"]}] for p in batch],
            num_samples=batch[0]["samples"],
            temperature=batch[0]["temperature"],
            top_p=1.0,
            top_k=0,
            max_new_tokens=max_new,
            seed=SEED,
            # 64 rows use the machine fully, and drafts would not change the samples
            speculate=False,
            record=path,
        )
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, prompt in zip(rows, batch, strict=True):
        row["problem"] = prompt["id"]
        row["top"] = [[_short(*at, digits) for at in sample] for sample in row["top"]]
    return rows


def _short(tokens: list[int], probs: list[float], digits: int) -> list[list]:
    short = [round(p, digits) for p in probs]
    positive = [(t, p) for t, p in zip(tokens, short, strict=True) if p > 0]
    return [[t for t, _ in positive], [p for _, p in positive]]


if __name__ == "__main__":
    main()
