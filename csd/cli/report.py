"""`csd report FILE -o report.html`: report of a run, or of a results file of `csd eval`."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cli.commands import add_command
from csd.evaluate.plot import read_results
from csd.schema.read import naming, read_file, read_lines
from csd.schema.write import WholeFile


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands, "report", "write a page that shows what a run drew and drafted, or an evaluation",
        ["csd report out.json -o report.html", "csd report results.jsonl -o results.html"],
        "howto/report.md",
    )  # fmt: skip
    parser.add_argument("file", help="what csd sample --json --drafts printed, or csd eval wrote")
    parser.add_argument("-o", "--out", help="the page; by default FILE ending in .html")
    parser.set_defaults(run=_report)


def _report(args: Namespace) -> int:
    out = Path(args.out) if args.out else Path(args.file).with_suffix(".html")
    if out.exists() and out.samefile(args.file):
        raise ValueError(f"out must be another file than the one that is shown, got {str(out)!r}")
    text = _page(args.file)
    with WholeFile(out) as file:
        file.write([text.encode()])
    print(out)
    return 0


def _page(path: str) -> str:
    from csd.evaluate.report import eval_page, page

    if _is_results(path):
        return eval_page(*read_results(path))
    result = read_file(path, dict)
    with naming(path):
        return page(result)


def _is_results(path: str) -> bool:
    """True if the first line is that of a results file; a run's file is one JSON object."""
    try:
        return "settings" in next(read_lines(path, dict), (0, {}))[1]
    except ValueError:
        return False
