"""`csd import LOG --model MODEL -o TRACES`: other systems' logs as a trace file."""

import sys
from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cli.common import add_command
from csd.engine.options.show import add_flags
from csd.evaluate.import_logs import traces_of
from csd.models.load import tokenizer_of
from csd.models.load.checkpoint import quiet_libraries
from csd.traces.traces import write_traces
from csd.utils.arguments import check_number
from csd.utils.files import naming, read_lines


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "import",
        "convert logs of other systems to a trace file for csd replay",
        ["csd import log.jsonl --model MODEL -o traces.jsonl --temperature 0.7"],
        "howto/record.md",
    )
    parser.add_argument(
        "log",
        help="JSONL file; each line has a prompt (text, messages or "
        "prompt_token_ids), and completions, choices in OpenAI's "
        "format, or outputs in vLLM's",
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
    parser.add_argument("--plain", action="store_true", help="do not use the chat template")
    add_flags(parser, ("revision",))
    parser.set_defaults(run=_import)


def _import(args: Namespace) -> int:
    check_number("temperature", args.temperature, 0)
    if Path(args.out).exists():
        raise ValueError(f"out must be a new file, got {args.out!r}")
    with quiet_libraries():
        tokenizer = tokenizer_of(args.model, args.revision)
    if tokenizer is None:
        raise ValueError(f"model must have a tokenizer, got {args.model!r}")
    with naming(args.log):
        traces = [
            *traces_of(
                read_lines(args.log, dict),
                tokenizer,
                temperature=args.temperature,
                plain=args.plain,
            )
        ]
        if not traces:
            raise ValueError("has no completions")
    write_traces(args.out, traces)
    tokens = sum(len(ids) for trace in traces for ids in trace.samples)
    print(f"{len(traces)} prompts, {tokens} tokens, in {args.out}", file=sys.stderr)
    return 0
