"""`csd audit`: check the tokens of recorded samples against a model."""

import json
import sys
from argparse import Namespace, _SubParsersAction
from itertools import chain
from random import SystemRandom

from csd.cli.common import MODEL, add_command, add_plain_flags, check_output, show, stamped
from csd.engine.call import trace_of
from csd.engine.engine import Engine
from csd.engine.generate import engine_for
from csd.engine.options.show import LOADING, add_flags, check_flags, loading
from csd.evaluate.audit import TIES, Audited, BitDifference, audit, has_same_bits, summary
from csd.state.filters import FILTERS
from csd.traces.receipt import differences
from csd.traces.traces import Trace, read_traces
from csd.utils.arguments import check_number, check_whole

# without temperature, which each trace has
FLAGS = (
    *(name for name in FILTERS if name != "temperature"),
    "min_new_tokens",
    "bad_words",
    "no_repeat_ngram_size",
    "frequency_penalty",
    "presence_penalty",
    "max_thinking_tokens",
)
# drafted nodes of the runs for --calibrate: their steps differ in rows and therefore in rounding
BUDGETS = (0, 8, 48)


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "audit",
        "check the tokens of recorded samples against a model",
        [
            "csd audit traces.jsonl --model MODEL",
            "csd audit traces.jsonl --model MODEL --samples 3",
            "csd audit traces.jsonl --model MODEL --calibrate",
        ],
        "evaluation.md",
    )
    parser.add_argument("file", help="trace file, written by csd record or record=")
    parser.add_argument("--model", required=True, help=MODEL)
    add_plain_flags(
        parser,
        "json",
        tie=(
            float,
            "largest gap between two perturbed scores that counts as a tie; by default the "
            "rounding error of the model's dtype",
        ),
        samples=(int, "check so many samples, drawn at random"),
        calibrate="also draw samples of the same prompts with several budgets and audit them; "
        "their share of different tokens estimates the false positives",
    )
    add_flags(parser, (*FLAGS, *LOADING))
    parser.set_defaults(run=_audit)


def _audit(args: Namespace) -> int:
    check_flags(args, (*FLAGS, *LOADING))
    check_output()
    traces = [*read_traces(args.file)]
    if not traces:
        raise ValueError(f"{args.file} has no samples")
    sampling = {name: getattr(args, name) for name in FLAGS}
    engine = engine_for(args.model, **loading(args))
    if args.samples is not None:
        traces = some(traces, check_whole("samples", args.samples, 1))
    to_the_bit = args.tie is None and has_same_bits(engine, traces)
    tie = 0.0 if to_the_bit else TIES[engine.dtype]
    tie = tie if args.tie is None else check_number("tie", args.tie, 0)
    by_trace = [*audit(engine, traces, **sampling)]
    samples = [*chain(*by_trace)]
    figures = summary(samples, tie) | {"compared": "bits" if to_the_bit else "scores"}
    different = _differences(engine, traces, by_trace) if to_the_bit else []
    if to_the_bit:
        figures["bits_equal"] = not different
    if args.calibrate:
        own = audit(engine, _drawn(engine, traces, sampling), **sampling)
        figures["own_different_share"] = summary(chain(*own), tie)["different_share"]
    if args.json:
        show(json.dumps(stamped("audit", figures)), ".json")
        return 0
    lines = different or [
        f"problem {s.problem}, sample {s.index}: {len(s.different(tie))} of {len(s.tokens)} "
        f"tokens differ, the first at position {s.different(tie)[0]}"
        for s in samples
        if s.different(tie)
    ]
    lines += [
        f"{name:>20}  {value:.4f}" if isinstance(value, float) else f"{name:>20}  {value}"
        for name, value in figures.items()
    ]
    show("\n".join(lines))
    return 0


def some(traces: list[Trace], count: int) -> list[Trace]:
    """Traces of `count` samples, or of all if there are no more, at random."""
    every = [(i, place) for i, trace in enumerate(traces) for place in range(len(trace.samples))]
    # whoever made the record cannot foresee them
    chosen = SystemRandom().sample(every, min(count, len(every)))
    by_trace = {i: sorted(p for j, p in chosen if j == i) for i in sorted({i for i, _ in chosen})}
    return [traces[i].of_samples(places) for i, places in by_trace.items()]


def _differences(engine: Engine, traces: list[Trace], by_trace: list[list[Audited]]) -> list[str]:
    """Lines about samples whose bits differ, and what differs between the two machines."""
    lines = []
    for trace, samples in zip(traces, by_trace, strict=True):
        for sample in samples:
            if (difference := BitDifference.find(sample, trace)) is not None:
                first, *rest = difference.lines()
                lines += [f"problem {sample.problem}, sample {sample.index}: {first}", *rest]
    receipts = [trace.receipt for trace in traces if trace.receipt is not None]
    if lines:
        lines += differences(receipts[0], engine.model.receipt()) or ["the receipts are equal"]
    return lines


def _drawn(engine: Engine, traces: list[Trace], sampling: dict) -> list[Trace]:
    """Draw samples of the same prompts with this engine, under each of BUDGETS; returns traces."""
    recorded: list[Trace] = []
    for budget in BUDGETS:
        for trace in traces:
            call = engine.prepare(
                trace.prompt,
                num_samples=len(trace.samples),
                temperature=trace.temperature,
                max_new_tokens=max(map(len, trace.samples)),
                seed=trace.seed,
                budget=budget,
                **sampling,
            )
            for _ in engine.draw(call):
                print(".", end="", file=sys.stderr, flush=True)
            recorded += map(trace_of, call.requests)
    print(file=sys.stderr)
    return recorded
