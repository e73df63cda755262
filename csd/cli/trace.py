"""Commands on recorded samples: `csd record`, `csd replay`, `csd import` and `csd prior`."""

import json
import sys
from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import Any

from csd.cli.common import MODEL, add_command, add_plain_flags, check_counts, stamped
from csd.engine.generate import engine_for
from csd.engine.options.engine_arguments import SharedOptions
from csd.engine.options.show import LOADING, add_flags, check_flags, loading
from csd.engine.step.budget import StepTimeTable
from csd.evaluate.import_logs import traces_of
from csd.evaluate.resumable_results import record
from csd.graph.prior import DEFAULT_CONTEXTS, MAX_CONTEXTS, MIN_CONTEXTS, Prior, is_prior
from csd.graph.registry import check_known, names
from csd.models.load import tokenizer_of
from csd.models.load.checkpoint import quiet_libraries
from csd.models.text.prompts import as_message, check_prompt, has_chat
from csd.state.filters import FILTERS
from csd.state.pool import MAX_NODES
from csd.traces.traces import read_traces, write_traces
from csd.utils.arguments import check_number
from csd.utils.files import digest, naming, read_lines
from csd.utils.phases import showing

RECORD_FLAGS = ("num_samples", "max_new_tokens", *FILTERS, "seed", "stop", "ignore_eos", "budget")


def add(commands: _SubParsersAction) -> None:
    record = add_command(
        commands,
        "record",
        "draw samples and write them to a trace file",
        ["csd record MODEL prompts.jsonl -o traces.jsonl -n 16"],
        "howto/record.md",
    )
    record.add_argument("model", help=MODEL)
    record.add_argument(
        "prompts",
        help="JSONL file; each line has a prompt (a string or messages), a question or a problem",
    )
    record.add_argument("-o", "--out", required=True, help="trace file to write; must not exist")
    defaults: dict[str, Any] = dict(num_samples=16, max_new_tokens=256, temperature=0.7, seed=0)
    add_flags(record, (*RECORD_FLAGS, *LOADING), **defaults)
    limit = int, "number of prompts to take from the start of the file"
    add_plain_flags(record, "plain", limit=limit)
    record.set_defaults(run=_record)

    replay = add_command(
        commands,
        "replay",
        "estimate how much faster csd would draw recorded samples",
        ["csd replay traces.jsonl", "csd replay traces.jsonl --model MODEL --nodes 0 8 16"],
        "howto/record.md",
    )
    replay.add_argument("traces", nargs="+", help="trace files")
    replay.add_argument(
        "-n", "--num-samples", type=int, help="number of samples per prompt; by default all"
    )
    replay.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[0, 2, 4, 8, 16],
        help="numbers of drafted tokens per sample and step to compare",
    )
    replay.add_argument(
        "--drafter",
        default="consensus",
        help=f"drafter to replay: csd's own, or another for comparison: {', '.join(names())}",
    )
    add_flags(replay, LOADING)
    add_flags(replay, ("share_rows",), SharedOptions)
    add_plain_flags(
        replay,
        "json",
        limit=(int, "number of prompts to take from the start of each file"),
        cost=(
            str,
            'JSON file {"rows": [..], "seconds": [..]} with the time of a step by its number of '
            "rows, as written by python -m bench step_times MODEL --json FILE",
        ),
        model=(
            str,
            f"measure the step times of this model on this machine instead of --cost: {MODEL}",
        ),
    )
    replay.set_defaults(run=_replay)
    _add_import(commands)
    _add_prior(commands)


def prompts_of(path: str, chat: bool, limit: int | None = None) -> list:
    """Prompts of a JSONL file; with `chat`, strings become messages of a user."""
    prompts = []
    for number, row in read_lines(path, dict):
        names = [n for n in ("prompt", "question", "problem") if n in row]
        with naming(f"{path}, line {number}"):
            if not names:
                raise ValueError(f"must have prompt, question or problem, got {sorted(row)}")
            check_prompt(row[names[0]], names[0])
        prompts.append(as_message(row[names[0]], chat))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts[:limit]


def _record(args: Namespace) -> int:
    from tqdm import tqdm

    check_flags(args, (*RECORD_FLAGS, *LOADING))
    check_counts(args, ("limit",))
    if Path(args.out).exists():
        raise ValueError(f"out must be a new file, got {args.out!r}")
    options = {name: getattr(args, name) for name in RECORD_FLAGS}
    with showing(None):
        engine = engine_for(args.model, **loading(args))
    chat = has_chat(engine.tokenizer) and not args.plain
    prompts = prompts_of(args.prompts, chat, args.limit)
    settings = {
        "model": args.model,
        "revision": args.revision,
        "dtype": args.dtype,
        **({} if args.quantization is None else {"quantization": args.quantization}),
        "prompts_sha256": digest(args.prompts),
        "plain": args.plain,
        "limit": args.limit,
        **options,
    }
    try:
        with tqdm(total=len(prompts) * args.num_samples, unit="sample") as bar:
            traces = record(
                engine, prompts, args.out, settings, bar.update, progress=False, **options
            )
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        return 130
    tokens = sum(len(t) for trace in traces for t in trace.samples)
    print(f"{len(traces)} prompts, {tokens} tokens, in {args.out}", file=sys.stderr)
    return 0


def _replay(args: Namespace) -> int:
    from tqdm import tqdm

    from csd.evaluate.replay import gain

    check_counts(args, ("num_samples", "limit"))
    check_known(args.drafter)
    for nodes in args.nodes:
        if not 0 <= nodes < MAX_NODES:
            # a slot has at most MAX_NODES rows, the root included
            raise ValueError(f"nodes must lie in [0, {MAX_NODES - 1}], got {nodes}")
    if args.cost and args.model:
        raise ValueError("only one of model and cost may be given, got both")
    cost = StepTimeTable.read(args.cost) if args.cost else None
    traces = [t for path in args.traces for t in list(read_traces(path))[: args.limit]]
    if not traces:
        raise ValueError(f"traces must hold at least one prompt, got {args.traces}")
    if args.model:
        with showing(False if args.json else None):
            engine = engine_for(args.model, **loading(args))
            cost = engine.step_times.measure()
    # shown on a terminal only
    bar = tqdm(args.nodes, disable=True if args.json else None, leave=False, unit="nodes")
    rows = [
        gain(traces, nodes, cost, args.num_samples, args.drafter, args.share_rows) for nodes in bar
    ]
    output = {"prompts": len(traces), "drafter": args.drafter, "rows": rows}
    if args.json:
        print(json.dumps(stamped("replay", output)))
        return 0
    print("nodes  used    tau  rows/token" + "  expected speed-up" * (cost is not None))
    for row in rows:
        speedup = f" {row['speedup']:10.2f}" if cost is not None else ""
        print(
            f"{row['nodes']:5} {row['nodes_used']:5.1f} {row['tau']:6.2f} "
            f"{row['rows_per_token']:11.2f}{speedup}"
        )
    print(f"{len(traces)} prompts")
    if cost is None:
        print(
            "pass --model MODEL to measure its step times on this machine and show the expected "
            "speed-up"
        )
    else:
        print(verdict(rows))
    return 0


def verdict(rows: list[dict]) -> str:
    """Sentence on the expected speed-up of csd at the best number of drafted nodes."""
    best = max(rows, key=lambda row: row["speedup"])
    if best["speedup"] < 1.005:
        return "csd would draw these samples no faster, with any number of drafted tokens"
    return (
        f"csd would draw these samples {best['speedup']:.2f} times as fast as one token per step, "
        f"with at most {best['nodes']} drafted tokens per sample and step (tau {best['tau']:.2f}) "
        f"and {best['rows_per_token']:.2f} rows of the model per token; this leaves out the "
        "drafter's own time"
    )


def _add_import(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "import",
        "convert logs of other systems to a trace file for csd replay",
        ["csd import log.jsonl --model MODEL -o traces.jsonl --temperature 0.7"],
        "howto/record.md",
    )
    parser.add_argument(
        "log",
        help="JSONL file; each line has a prompt (text, messages or prompt_token_ids), and "
        "completions, choices in OpenAI's format, or outputs in vLLM's",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="model whose tokenizer encodes the texts; its weights are not loaded",
    )
    parser.add_argument("-o", "--out", required=True, help="trace file to write; must not exist")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of lines that have none"
    )
    add_plain_flags(parser, "plain")
    add_flags(parser, ("revision",))
    parser.set_defaults(run=_import)


def _import(args: Namespace) -> int:
    check_number("temperature", args.temperature, 0)
    if Path(args.out).exists():
        raise ValueError(f"out must be a new file, got {args.out!r}")
    tokenizer = _tokenizer_of(args)
    settings: dict[str, Any] = {"temperature": args.temperature, "plain": args.plain}
    with naming(args.log):
        traces = [*traces_of(read_lines(args.log, dict), tokenizer, **settings)]
        if not traces:
            raise ValueError("has no completions")
    write_traces(args.out, traces)
    tokens = sum(len(ids) for trace in traces for ids in trace.samples)
    print(f"{len(traces)} prompts, {tokens} tokens, in {args.out}", file=sys.stderr)
    return 0


def _tokenizer_of(args: Namespace) -> Any:
    with quiet_libraries():
        tokenizer = tokenizer_of(args.model, args.revision)
    if tokenizer is None:
        raise ValueError(f"model must have a tokenizer, got {args.model!r}")
    return tokenizer


def _add_prior(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "prior",
        "learn n-grams of recorded answers, which draft for other prompts",
        ["csd prior traces.jsonl -o math.csdprior", "csd prior *.csdprior -o all.csdprior"],
        "history.md",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="trace file of csd record, or a prior to merge"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--contexts",
        type=int,
        default=DEFAULT_CONTEXTS,
        help=f"capacity of the table, a power of two from {MIN_CONTEXTS} to {MAX_CONTEXTS}",
    )
    parser.add_argument(
        "--model",
        help="model whose tokenizer the token ids are of; its weights are not loaded. The prior is "
        "then refused for models with another tokenizer",
    )
    add_flags(parser, ("revision",))
    parser.set_defaults(run=_prior)


def _prior(args: Namespace) -> int:
    check_flags(args, ("revision",))
    if args.revision is not None and args.model is None:
        raise ValueError(f"revision needs --model, whose tokenizer it is of, got {args.revision!r}")
    tokenizer = None if args.model is None else _tokenizer_of(args)
    prior = Prior(contexts=args.contexts, tokenizer=tokenizer)
    for path in args.files:
        if is_prior(path):
            prior.merge(Prior.load(path))
            continue
        for trace in read_traces(path):
            prior.add(trace.prompt, trace.samples, trace.top)
    prior.save(args.out)
    print(
        f"{prior.contexts} contexts of {prior.tokens} tokens ({prior.nbytes / 1e6:.1f} MB in "
        f"memory), in {args.out}",
        file=sys.stderr,
    )
    return 0
