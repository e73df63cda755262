"""`csd report out.json -o report.html`."""

import json
from argparse import Namespace, _SubParsersAction
from pathlib import Path


def add(commands: _SubParsersAction) -> None:
    parser = commands.add_parser("report", help="a page that shows what a run drew and drafted")
    parser.add_argument("file", help="what csd sample --json --drafts printed")
    parser.add_argument("-o", "--out", help="the page; FILE.html if left out")
    parser.set_defaults(run=_report)


def _report(args: Namespace) -> int:
    from csd.report import page

    try:
        result = json.loads(Path(args.file).read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{args.file} is not JSON: {error}") from error
    out = Path(args.out) if args.out else Path(args.file).with_suffix(".html")
    out.write_text(page(result), "utf-8")
    print(out)
    return 0
