"""An EAGLE head for SmolLM2-135M-Instruct: its samples are drawn, then learnt.

    python -m bench eagle_head GSM8K.jsonl -o FOLDER [--parts N] [--traces FILES] [--json F]

Of our own prompts eight samples of `bench/traces/smollm2.jsonl.gz` are learnt. The first 1,000
problems of the file are in 20 parts: part k has problems k, k + 20, k + 40, .. `csd record` draws
two samples of each problem of the first N parts (at most 256 tokens at temperature 0.7, seed 0)
into FOLDER, where parts that are there are kept. FILES are further samples of these problems.
`csd.train_head` trains on all of it, which is then also in FOLDER/traces.jsonl. Both go on where
they were interrupted. The head is in FOLDER/head; its curve, its settings and the machine are in F.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

import bench
import csd
from bench.lib.common import finish
from csd.cli.main import main as csd_command
from csd.models.demo import smollm2_path
from csd.traces.traces import read_traces, write_traces

PROBLEMS, PARTS = 1000, 20
# of each prompt of ours, the first so many
OURS, SAMPLES = Path(bench.__file__).parent / "traces" / "smollm2.jsonl.gz", 8
SAMPLING = dict(num_samples=2, max_new_tokens=256, temperature=0.7, seed=0)
RECIPE = dict(
    epochs=1,
    batch=512,
    learning_rate=1e-3,
    token_weight=0.1,
    noise=0.1,
    held_out=0.03,
    every=100,
    seed=0,
)


def recorded(model: str, problems: Path, folder: Path, parts: int) -> list[Path]:
    """The trace files of the first parts of the problems; missing ones are drawn."""
    trace_files, lines = [], problems.read_text().splitlines()[:PROBLEMS]
    for part in range(parts):
        trace_files.append(folder / f"gsm8k-{part:02}.jsonl")
        if trace_files[-1].exists():
            continue
        asked = folder / f"gsm8k-{part:02}.prompts.jsonl"
        rows = [{"question": json.loads(line)["question"]} for line in lines[part::PARTS]]
        asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in SAMPLING.items()]
        code = csd_command(["record", model, str(asked), "-o", str(trace_files[-1]), *flags])
        if code:
            raise SystemExit(code)
    return trace_files


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", type=Path, help="GSM8K's test file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of samples and head")
    parser.add_argument("--parts", type=int, default=PARTS, help="of the problems, at most 20")
    parser.add_argument("--traces", type=Path, nargs="+", default=[], help="further samples")
    parser.add_argument("--json", help="result file")
    for name, value in RECIPE.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    model = smollm2_path()
    files = [*args.traces, *recorded(model, args.problems, args.out, args.parts)]
    traces = [trace for file in files for trace in read_traces(file)]
    for trace in read_traces(OURS):
        traces.append(replace(trace, samples=trace.samples[:SAMPLES], indices=None))
    # REST reads one file, which needs no probabilities
    together = args.out / "traces.jsonl"
    write_traces(together, [replace(trace, top=None) for trace in traces])
    recipe = {name: getattr(args, name) for name in RECIPE}
    curve = csd.train_head(model, together, args.out / "head", progress=True, **recipe)
    size = (args.out / "head" / "model.safetensors").stat().st_size
    finish(
        {
            "bench": "eagle_head",
            "parts": args.parts,
            "prompts": len(traces),
            "samples": sum(len(t.samples) for t in traces),
            "sampled_tokens": sum(len(s) for t in traces for s in t.samples),
            "bytes": size,
            "sampling": SAMPLING,
            "recipe": recipe,
            "curve": curve,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
