"""`csd report` and `csd plot`: a page of a run or of an evaluation, and curves of evaluations."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cli.common import add_command
from csd.evaluate.plot import COSTS, FIGURES, curve, draw, read_results
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
    _add_plot(commands)


def _report(args: Namespace) -> int:
    out = Path(args.out) if args.out else Path(args.file).with_suffix(".html")
    if out.exists() and out.samefile(args.file):
        raise ValueError(f"out must differ from the input file, got {str(out)!r}")
    text = _page(args.file)
    with WholeFile(out, alone=False) as file:
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


def _add_plot(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "plot",
        "plot accuracy by cost, with one line per results file of csd eval",
        [
            "csd plot results.jsonl -o curve.svg",
            "csd plot small.jsonl large.jsonl -o curve.png --x seconds --y pass",
        ],
        "howto/self_consistency.md",
    )
    parser.add_argument(
        "files",
        nargs="+",
        help="results files of csd eval; each line in the plot is labelled with its file's name",
    )
    parser.add_argument("-o", "--out", required=True, help="picture to write: .svg, .png or .pdf")
    parser.add_argument(
        "--x",
        choices=COSTS,
        default="tokens",
        help="cost per problem, on the x axis. seconds: the run's, in proportion to the tokens; "
        "k samples alone take longer",
    )
    parser.add_argument(
        "--y",
        choices=FIGURES,
        default="maj",
        help="accuracy of k samples, on the y axis: maj@k or pass@k",
    )
    parser.set_defaults(run=_plot)


def _plot(args: Namespace) -> int:
    curves: dict[str, list] = {}
    for path in args.files:
        name = Path(path).name
        curves[path if name in curves else name] = curve(path, args.x, args.y)
    draw(curves, args.out, args.x, args.y)
    print(args.out)
    return 0
