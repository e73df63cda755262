"""Record the study's traces: SmolLM2 on word problems at five temperatures and on other tasks.

    python -m bench record_study [--seconds 900]

Draws the samples that `bench/traces/study.jsonl.gz` does not have yet, so the run can be stopped
and restarted. Prompts are our own: `bench/prompts/` and the word problems of `bench.e2e.cpu`. A
trace's problem is "task/number@temperature".
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import torch

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.record import FOLDER, batches, record
from csd.models.demo import smollm2_path

TRACES = FOLDER / "study.jsonl.gz"
PROMPTS = FOLDER.parent / "prompts"
TASKS = ("code", "commonsense", "medical", "writing")
TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.3)
# new tokens per sample, for short answers and for worked solutions
SHORT, LONG = 64, 96


def wanted() -> list[dict]:
    """Returns every prompt with its temperature, number of samples and limit."""
    entries = []
    for task in TASKS:
        entries += _entries(task, prompts(task), 0.7, 8, SHORT)
    entries += _entries("writing", prompts("writing"), 1.3, 8, SHORT)
    for t in TEMPERATURES:
        # temperature 0.7 has more samples, so that studies can vary their number
        entries += _entries("sums", PROBLEMS[:5], t, 32 if t == 0.7 else 8, LONG)
    return entries


def prompts(task: str) -> list[str]:
    lines = (PROMPTS / f"{task}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def _entries(task: str, texts: list[str], temperature: float, samples: int, tokens: int):
    return [
        {
            "id": f"{task}/{i}@{temperature}",
            "prompt": text,
            "temperature": temperature,
            "samples": samples,
            "tokens": tokens,
        }
        for i, text in enumerate(texts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--out", type=Path, default=TRACES)
    args = parser.parse_args()
    done = set()
    if args.out.exists():
        with gzip.open(args.out, "rt") as file:
            done = {json.loads(line)["problem"] for line in file}
    engine = csd.Engine(smollm2_path(), max_slots=64, dtype=torch.float32)
    begun = time.perf_counter()
    for batch in batches([p for p in wanted() if p["id"] not in done]):
        start = time.perf_counter()
        if start - begun > args.seconds:
            break
        rows = record(engine, batch, batch[0]["tokens"], digits=3)
        with gzip.open(args.out, "at") as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        names = ", ".join(p["id"] for p in batch)
        print(f"{names}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
