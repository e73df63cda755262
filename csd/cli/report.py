"""`csd report out.json -o report.html`."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.schema.read import naming, read_file
from csd.schema.write import WholeFile


def add(commands: _SubParsersAction) -> None:
    parser = commands.add_parser("report", help="a page that shows what a run drew and drafted")
    parser.add_argument("file", help="what csd sample --json --drafts printed")
    parser.add_argument("-o", "--out", help="the page; FILE.html if left out")
    parser.set_defaults(run=_report)


def _report(args: Namespace) -> int:
    from csd.evaluate.report import page

    result = read_file(args.file, dict)
    out = Path(args.out) if args.out else Path(args.file).with_suffix(".html")
    if out.exists() and out.samefile(args.file):
        raise ValueError(f"out must be another file than the one that is shown, got {str(out)!r}")
    with WholeFile(out) as file:
        with naming(args.file):
            text = page(result)
        file.write([text.encode()])
    print(out)
    return 0
