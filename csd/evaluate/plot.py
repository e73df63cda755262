"""Plots of accuracy by cost: curves over k of `csd eval`'s results, with intervals."""

from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from csd.evaluate.evaluation import Settings, check_row, summary
from csd.evaluate.vote import Vote
from csd.utils.check import check
from csd.utils.files import WholeFile, naming, read_lines
from csd.utils.lazy import check_installed

# cost on the horizontal axis -> its key in a summary
COSTS = {"samples": "k", "tokens": "tokens", "seconds": "seconds"}
FIGURES = {"maj": "maj_at_k", "pass": "pass_at_k"}
NAMES = {
    "samples": "samples per problem",
    "tokens": "tokens per problem",
    "seconds": "share of the run's seconds per problem, in proportion to the tokens",
    "maj": "accuracy of the vote, maj@k",
    "pass": "pass@k",
}
# distinct for readers with colour blindness (Okabe and Ito)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def read_results(path: str | Path) -> tuple[dict, list[dict]]:
    """Settings and rows of a results file. Raises ValueError, naming the file, if it is not one."""
    lines = read_lines(path, dict)
    with naming(str(path)):
        settings = next(lines, (0, {}))[1].get("settings")
        if not isinstance(settings, dict):
            raise ValueError("must be a results file of csd eval, whose first line has 'settings'")
    with naming(f"{path}, line 1, settings"):
        check(settings, Settings)
    rows: list[dict] = []
    most = settings["num_samples"]
    least = Vote().least(most) if settings.get("until_decided") else most
    for number, row in lines:
        with naming(f"{path}, line {number}"):
            check_row(row)
            if not least <= (samples := len(row["correct"])) <= most:
                wanted = most if least == most else f"{least} to {most}"
                raise ValueError(f"must have {wanted} samples, got {samples}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} must have at least one problem, got none")
    return settings, rows


class Point(NamedTuple):
    """Accuracy of k samples per problem."""

    k: int
    cost: float  # per problem
    value: float
    low: float  # of the 95% interval over the problems
    high: float


def curve(path: str | Path, cost: str, figure: str) -> list[Point]:
    """Points of a results file, by the number of samples.

    cost: key of COSTS, per problem; figure: key of FIGURES. Raises ValueError like `read_results`.
    """
    settings, rows = read_results(path)
    until = Vote() if settings.get("until_decided") else None
    by_k = summary(rows, settings["num_samples"], until)["by_k"]
    if by_k[-1][FIGURES["maj"]] is None and figure == "maj":
        raise ValueError(f"{path} has programs, which do not vote: give --y pass")
    each = 1 if cost == "samples" else len(rows)
    return [
        Point(row["k"], row[COSTS[cost]] / each, *row[FIGURES[figure]])
        for row in by_k
        if row[FIGURES[figure]]
    ]


def title(curves: dict[str, list[Point]], figure: str) -> str:
    """The result: the accuracy of all samples and of one, or the curve that is highest."""
    name = "vote of" if figure == "maj" else "pass@"
    ends = {of: points[-1] for of, points in curves.items() if points}
    if not ends:
        return ""
    best = max(ends, key=lambda of: ends[of].value)
    k, last = ends[best].k, ends[best].value
    first = curves[best][0]
    if len(ends) > 1:
        return f"{name}{' ' * (figure == 'maj')}{k}: highest {last:.1%}, {best[:40]}"
    if figure == "pass":
        return f"pass@{k} {last:.1%}" + (f", pass@{first.k} {first.value:.1%}" if k > 1 else "")
    alone = f", one sample in {first.value:.1%}" if k > 1 and first.k == 1 else ""
    return f"a vote of {k} is right in {last:.1%} of the problems{alone}"


def draw(curves: dict[str, list[Point]], out: str | Path, cost: str, figure: str) -> None:
    """Plot curves, by name, to a file in the format of its extension.

    Raises ImportError without matplotlib, ValueError for an extension that it does not support, and
    OSError, which names the file, if it cannot be written.
    """
    check_installed("matplotlib", "plot", "csd plot")
    from matplotlib.figure import Figure

    # no pyplot, which has global state: the caller may have figures of its own
    made = Figure(figsize=(6.4, 4.0), layout="constrained")
    kinds = made.canvas.get_supported_filetypes()
    ending = Path(out).suffix.removeprefix(".")
    if ending not in kinds:
        raise ValueError(f"out must end in one of {', '.join(sorted(kinds))}, got {str(out)!r}")
    axes: Any = made.subplots()
    for i, (name, points) in enumerate(curves.items()):
        k, x, y, low, high = zip(*points, strict=True)
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y, "o-", color=colour, label=name, markersize=4)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        # on the axis of samples, k is at its ticks
        for at in zip(k, x, y, strict=True) if cost != "samples" else ():
            axes.annotate(
                f"k = {at[0]}" if at[0] == k[0] else f"{at[0]}",
                at[1:],
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontsize=8,
            )
    axes.set_xscale("log", base=2)
    if len(curves) == 1:
        axes.set_xticks([point.cost for points in curves.values() for point in points], minor=False)
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set_xlabel(NAMES[cost])
    axes.set_ylabel(f"{NAMES[figure]}, 95% interval")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(title(curves, figure), fontsize=10, wrap=True)
    axes.grid(alpha=0.3)
    # outside the axes, where no curve is; as many columns as names fit side by side
    columns = max(1, 66 // (max(map(len, curves), default=0) + 8))
    made.legend(loc="outside upper center", ncols=min(columns, len(curves)), frameon=False)
    data = BytesIO()
    made.savefig(data, format=ending, metadata={"Date": None} if ending == "svg" else None)
    with WholeFile(out, alone=False) as file:
        file.write([data.getvalue()])
