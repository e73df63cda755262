"""`csd report FILE -o report.html`: report of a run, or of a results file of `csd eval`."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cli.common import add_command
from csd.evaluate.plot import read_results
from csd.utils.files import WholeFile, naming, read_file, read_lines


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "report",
        "write an HTML page that shows the samples and drafts of a run, or an evaluation",
        ["csd report out.json -o report.html", "csd report results.jsonl -o results.html"],
        "howto/report.md",
    )
    parser.add_argument(
        "file", help="output of csd sample --json --drafts, or results file of csd eval"
    )
    parser.add_argument("-o", "--out", help="page to write; by default the file's name with .html")
    parser.set_defaults(run=_report)


def _report(args: Namespace) -> int:
    out = Path(args.out) if args.out else Path(args.file).with_suffix(".html")
    if out.exists() and out.samefile(args.file):
        raise ValueError(f"out must differ from the input file, got {str(out)!r}")
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
