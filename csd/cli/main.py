"""The `csd` command."""

import argparse
import json
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from csd.cli import COMMANDS, audit, doctor
from csd.cli import eval as cli_eval
from csd.cli import report as cli_report
from csd.cli import serve as cli_serve
from csd.cli import trace as cli_trace
from csd.cli.common import (
    MODEL,
    Help,
    add_command,
    add_history_flag,
    add_plain_flags,
    check_output,
    flush_output,
    keep,
    open_history,
    put,
    show,
    stamped,
)
from csd.engine.generate import engine_for
from csd.engine.options.show import LOADING, add_flags, check_flags, loading
from csd.engine.results.result import Sample, Samples, to_json
from csd.engine.results.savings import told
from csd.evaluate.vote import vote
from csd.models.text.prompts import as_message, has_chat
from csd.state.filters import FILTERS
from csd.utils.check import one_line
from csd.utils.device import is_out_of_memory
from csd.utils.lazy import warn_of_namesake
from csd.utils.other_names import hint
from csd.utils.phases import showing, wants_progress, write
from csd.utils.version import __version__

ABOUT = "Draw many samples of a prompt, faster than plain sampling and with the same tokens."


def make_parser() -> tuple[argparse.ArgumentParser, _SubParsersAction]:
    """Returns the parser of the command, and the action that has its subcommands."""
    parser = argparse.ArgumentParser(
        prog="csd",
        description=ABOUT,
        formatter_class=Help,
        epilog="csd COMMAND --help shows the flags of a command, with defaults and examples",
    )
    parser.add_argument("--version", action="version", version=f"csd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_sample(commands)
    modules: tuple[Any, ...] = (cli_serve, cli_eval, cli_report, cli_trace, audit, doctor)
    for add in (*(module.add for module in modules), *COMMANDS):
        add(commands)
    return parser, commands


def main(argv: list[str] | None = None) -> int:
    # csd/__init__.py may be another project's
    warn_of_namesake()
    parser, commands = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if args.command is None and not unknown:
        parser.print_help()
        return 0
    if unknown:
        known = commands.choices.get(args.command, parser)
        flags = known._option_string_actions
        known.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown, flags)}")
    try:
        code = args.run(args)
        flush_output()
        return code
    except Exception as error:
        if not _is_of_user(error):
            raise
        # names of files, fields of files and texts of models are others'
        print(f"csd: {one_line(_reason(error))}", file=sys.stderr)
        with suppress(OSError):
            flush_output()
        return 2
    except KeyboardInterrupt:
        print("csd: interrupted", file=sys.stderr)
        return 130


def _reason(error: Exception) -> str:
    """The text of an error; of one that names a file, without its number; never empty."""
    if isinstance(error, OSError) and error.filename is not None:
        # bytes of a name that are no UTF-8 are shown as escapes
        name = str(error.filename).encode("utf-8", "backslashreplace").decode()
        return f"{name}: {error.strerror}"
    if is_out_of_memory(error):
        return f"out of memory: {error}".removesuffix(": ")
    return str(error) or type(error).__name__


def _is_of_user(error: Exception) -> bool:
    """True for errors that the command's user can remedy; others are csd's own, with traceback."""
    if isinstance(error, RuntimeError):
        return isinstance(error, NotImplementedError | RecursionError) or is_out_of_memory(error)
    kinds = ValueError | TypeError | ImportError | OSError | MemoryError | ArithmeticError
    return isinstance(error, kinds)


def _meant(unknown: list[str], flags: Iterable[str]) -> str:
    """Suggest the known flag that the first unknown one resembles; "" if there is none."""
    known = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
    names = [a[2:].partition("=")[0].replace("-", "_") for a in unknown if a.startswith("--")]
    suggestion = hint(names[0], known) if names else ""
    before, asked, name = suggestion.partition("did you mean ")
    is_flag = name.removesuffix("?") in known
    return before + asked + "--" + name.replace("_", "-") if is_flag else suggestion


SAMPLE_FLAGS = (
    *("num_samples", "first_sample", "max_new_tokens", "min_new_tokens", *FILTERS, "seed", "stop"),
    *("bad_words", "no_repeat_ngram_size", "frequency_penalty", "presence_penalty"),
    *("max_thinking_tokens", "top_logprobs", "entropy", "prompt_logprobs", "ignore_eos"),
    *("include_stop", "skip_special_tokens", "truncate_prompt", "budget", "speculate", "prior"),
    *("record", "drafts"),
)


def _add_sample(commands: _SubParsersAction) -> None:
    sample = add_command(
        commands,
        "sample",
        "draw samples of one prompt and take a majority vote on their answers",
        [
            'csd sample MODEL "What is 17 * 24?" -n 8 --temperature 0.7',
            'csd sample MODEL "What is 17 * 24?" --json --drafts > out.json',
        ],
        "quickstart.md",
    )
    sample.add_argument("model", help=MODEL)
    sample.add_argument("prompt", help="prompt text; for a chat model it is the user's message")
    add_flags(sample, (*SAMPLE_FLAGS, *LOADING, "decoder"), num_samples=8)
    add_history_flag(sample)
    add_plain_flags(sample, "plain", "json")
    sample.set_defaults(run=_sample)


def _sample(args: Namespace) -> int:
    check_flags(args, (*SAMPLE_FLAGS, *LOADING, "decoder"))
    if not args.prompt.strip():
        raise ValueError("prompt must not be empty")
    check_output()
    options = {name: getattr(args, name) for name in SAMPLE_FLAGS}
    printed = Printed(not args.json and not sys.stdout.isatty())
    # lines in a pipe and a log too: a machine's first call takes a minute
    with showing(not args.json), open_history(args.history) as history:
        engine = engine_for(args.model, **loading(args), decoder=args.decoder)
        chat = has_chat(engine.tokenizer) and not args.plain
        prompt = as_message(args.prompt, chat)
        call = engine.prepare(
            prompt, progress=False if args.json else None, history=history, **options
        )
        if printed.live and not wants_progress(None):
            write(f"csd: drawing {args.num_samples} samples, each printed as it ends ...\n")
        temperature = call.requests[0].params.temperature
        try:
            for _, sample in engine.samples(call):
                printed.add(sample)
        except (Exception, KeyboardInterrupt) as error:
            # samples drawn before the error are shown
            if hasattr(error, "samples") or isinstance(error, KeyboardInterrupt):
                _show(call.results()[0], engine.tokenizer, args, printed, temperature)
            raise
    _show(call.results()[0], engine.tokenizer, args, printed, temperature)
    return 0


class Printed:
    """Samples on standard output: each as it ends if `live`, else none before the end."""

    def __init__(self, live: bool):
        self.live = live
        self._texts: list[str] = []
        self._seen: set[int] = set()
        self._failed: OSError | None = None

    def add(self, sample: Sample) -> None:
        if not self.live:
            return
        self._seen.add(sample.index)
        self._put(_text(sample))

    def end(self, out: Samples, lines: list[str]) -> None:
        """Print the samples that were not printed yet, then the lines.

        If standard output has failed, writes all to a file, and raises OSError with its name.
        """
        self._put("\n".join([*(_text(s) for s in out if s.index not in self._seen), *lines]))
        if self._failed is not None:
            path = keep("\n".join(self._texts), ".txt")
            raise OSError(f"{self._failed}; the output is in {path}") from self._failed

    def _put(self, text: str) -> None:
        self._texts.append(text)
        if self._failed is None:
            try:
                put(text)
            except OSError as error:
                self._failed = error


def _text(sample: Sample) -> str:
    head = f"--- sample {sample.index} ({len(sample.tokens)} tokens, {sample.finish_reason})"
    return f"{head}\n{sample.text}"


def _show(
    out: Samples, tokenizer: Any, args: Namespace, printed: Printed, temperature: float | None
) -> None:
    if args.json:
        show(_json(out, tokenizer, args), ".json")
        return
    figures = f"--- {told(out, temperature)}", f"--- {out.stats}; seed {out.seed}"
    printed.end(out, [*_vote(out), *figures])


def _vote(out: Samples) -> list[str]:
    try:
        decided = vote(out)
    except ImportError as error:
        return [f"--- no vote: {error}"]
    lines = []
    answers = sum(answer is not None for answer in decided.answers)
    # a list or a story may have a last number, and is no answer
    if answers and 2 * answers >= len(out):
        lines.append(f"--- vote: {decided}")
    elif decided.limited:
        lines.append(
            f"--- no vote: {answers} of {len(out)} samples have an answer, and "
            f"{decided.limited} were cut at --max-new-tokens"
        )
    if decided.thoughts_cut:
        lines.append(f"--- thoughts cut: {decided.thoughts_cut} of {len(decided.answers)}")
    return lines


def _json(out: Samples, tokenizer: Any, args: Namespace) -> str:
    try:
        return json.dumps(stamped("sample", to_json(out, tokenizer, args.model, args.drafts)))
    except Exception as error:
        # a tokenizer may fail to decode single tokens
        path = keep(json.dumps(out.to_dict()), ".json")
        raise ValueError(f"{error}; the samples drawn so far are in {path}") from error


if __name__ == "__main__":
    sys.exit(main())
