"""The `csd` command."""

import argparse
import json
import sys
from argparse import Namespace, _SubParsersAction

from csd import cli_eval, cli_report, cli_trace, generate
from csd.prompts import as_message, has_chat
from csd.result import to_json
from csd.vote import vote


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="csd", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_sample(commands)
    cli_eval.add(commands, _budget)
    cli_report.add(commands)
    cli_trace.add(commands)
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


def _add_sample(commands: _SubParsersAction) -> None:
    sample = commands.add_parser("sample", help="draw samples of one prompt")
    sample.add_argument("model", help="a local folder, a hub name or a GGUF file")
    sample.add_argument("prompt")
    sample.add_argument("-n", "--num-samples", type=int, default=8)
    sample.add_argument("--max-new-tokens", type=int)
    for name in ("temperature", "top-p", "min-p", "repetition-penalty"):
        sample.add_argument(f"--{name}", type=float)
    sample.add_argument("--top-k", type=int)
    sample.add_argument("--seed", type=int)
    sample.add_argument("--stop", action="append", help="a string that ends a sample; repeatable")
    sample.add_argument("--budget", type=_budget, default="auto", help="'auto' or drafted tokens")
    sample.add_argument("--no-speculate", action="store_true")
    sample.add_argument("--plain", action="store_true", help="do not use the chat template")
    sample.add_argument("--device")
    sample.add_argument("--revision")
    sample.add_argument("--record", help="write a trace file")
    sample.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    sample.add_argument("--drafts", action="store_true", help="with --json: what was drafted, too")
    sample.set_defaults(run=_sample)


def _budget(text: str) -> str | int:
    return text if text == "auto" else int(text)


def _sample(args: Namespace) -> int:
    from csd.kept_engines import engine_for

    engine = engine_for(args.model, device=args.device, revision=args.revision)
    chat = has_chat(engine.tokenizer) and not args.plain
    prompt = as_message(args.prompt, chat)
    out = generate(
        engine,
        prompt,
        num_samples=args.num_samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        budget=args.budget,
        speculate=not args.no_speculate,
        record=args.record,
        drafts=args.drafts,
        progress=not args.json,
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
