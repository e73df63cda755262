"""The `csd` command."""

import argparse
import json
import sys
from argparse import Namespace, _SubParsersAction

from csd.cli import doctor
from csd.cli import eval as cli_eval
from csd.cli import report as cli_report
from csd.cli import trace as cli_trace
from csd.cli.history import add_history_flag, open_history
from csd.engine.options import add_flags, check_flags
from csd.engine.result import Samples, to_json
from csd.engine.sampling import FILTERS
from csd.evaluate.vote import vote
from csd.generate import engine_for
from csd.models.prompts import as_message, has_chat


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="csd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_sample(commands)
    cli_eval.add(commands)
    cli_report.add(commands)
    cli_trace.add(commands)
    doctor.add(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, ImportError, OSError, MemoryError, ArithmeticError,
            NotImplementedError) as error:  # fmt: skip
        print(f"csd: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("csd: interrupted", file=sys.stderr)
        return 130


SAMPLE_FLAGS = (
    "num_samples", "first_sample", "max_new_tokens", "min_new_tokens", *FILTERS, "seed", "stop",
    "ignore_eos", "budget", "speculate", "device", "revision", "record", "drafts",
)  # fmt: skip


def _add_sample(commands: _SubParsersAction) -> None:
    sample = commands.add_parser("sample", help="draw samples of one prompt")
    sample.add_argument("model", help="a local folder, a hub name or a GGUF file")
    sample.add_argument("prompt")
    add_flags(sample, SAMPLE_FLAGS, num_samples=8)
    add_history_flag(sample)
    sample.add_argument("--plain", action="store_true", help="do not use the chat template")
    sample.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    sample.set_defaults(run=_sample)


def _sample(args: Namespace) -> int:
    check_flags(args, SAMPLE_FLAGS)
    options = {name: getattr(args, name) for name in SAMPLE_FLAGS}
    loading = {name: options.pop(name) for name in ("device", "revision")}
    engine = engine_for(args.model, **loading)
    chat = has_chat(engine.tokenizer) and not args.plain
    prompt = as_message(args.prompt, chat)
    with open_history(args.history) as history:
        out: Samples = engine.generate(
            prompt, progress=not args.json, history=history, **options
        )
    if args.json:
        print(json.dumps(to_json(out, engine.tokenizer, args.model, args.drafts)))
        return 0
    for sample in out:
        print(f"--- sample {sample.index} ({len(sample.tokens)} tokens, {sample.finish_reason})")
        print(sample.text)
    decided = vote(out)
    if decided.answer is not None:
        print(f"--- vote: {decided.answer} ({decided.count} of {len(decided.answers)})")
    print(f"--- {out.stats.tokens_per_step:.2f} tokens per step, seed {out.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
