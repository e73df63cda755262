"""`csd plot RESULTS... -o curve.svg`: accuracy by the number of samples and their cost."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path

from csd.cli.common import add_command
from csd.evaluate.plot import COSTS, FIGURES, curve, draw


def add(commands: _SubParsersAction) -> None:
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
        "--x", choices=COSTS, default="tokens", help="cost per problem, on the x axis"
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
