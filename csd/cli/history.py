"""The flag `--history` of `csd sample` and `csd eval`."""

from argparse import ArgumentParser
from contextlib import AbstractContextManager, nullcontext

from csd.traces.history import History


def add_history_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--history",
        metavar="FILE",
        help="trace file of past samples: drafts also come from them, and new samples are appended",
    )


def open_history(path: str | None) -> AbstractContextManager[History | None]:
    """Context manager of the history in a file, or of None without a path."""
    return nullcontext() if path is None else History(path=path)
