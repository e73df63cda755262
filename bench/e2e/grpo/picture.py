"""Picture of GRPO: reward by time and by step, and tokens that the first update would clip."""

import statistics
from pathlib import Path
from typing import Any

from csd.evaluate.plot import COLOURS

NAMES = {"csd": "csd", "trl": "TRL alone", "trl_batch": "TRL with generate_batch"}
# steps of a moving mean
WIDTH = 5


def draw(result: dict[str, Any], path: str | Path) -> None:
    """Plot mean and range over the seeds to an SVG file, the same one for the same result."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "csd", "font.size": 10}):
        # narrow, since a phone shows it at 390 pixels
        made = Figure(figsize=(4.8, 8.2), layout="constrained")
        axes: Any = made.subplots(3)
        for i, side in enumerate(NAMES):
            runs = [r["steps"] for r in result["runs"] if r["side"] == side]
            if not runs:
                continue
            curves = [smooth(r["reward"]) for r in runs]
            minutes = [sum(at) / len(at) for at in zip(*map(elapsed, runs), strict=True)]
            of_step = [*zip(*curves, strict=True)]
            shares = [*zip(*(smooth(r["outside_clip"]) for r in runs), strict=True)]
            number = range(1, len(minutes) + 1)
            plots = zip(axes, (minutes, number, number), (of_step, of_step, shares), strict=True)
            for ax, x, of_step in plots:
                ax.plot(x, [*map(statistics.mean, of_step)], color=COLOURS[i], label=NAMES[side])
                low, high = [*map(min, of_step)], [*map(max, of_step)]
                ax.fill_between(x, low, high, color=COLOURS[i], alpha=0.2, linewidth=0)
        axes[0].set(xlabel="minutes, one thread", ylabel="reward", ylim=(0, None))
        axes[0].set_title(title(result))
        axes[1].set(xlabel="step", ylabel="reward", ylim=(0, None))
        axes[2].set(xlabel="step", ylabel="share of tokens", ylim=(-0.005, None))
        axes[2].set_title("tokens outside the clip range before the first update", fontsize=10)
        axes[2].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes[0].legend(loc="lower right", frameon=False)
        for ax in axes:
            ax.set_xlim(0, None)
            ax.grid(alpha=0.3)
        made.savefig(path, metadata={"Date": None})


def title(result: dict[str, Any]) -> str:
    """The result in two lines, of the sides that there are."""
    runs = result["runs"]
    seeds = len({r["seed"] for r in runs})
    head = f"GRPO, {seeds} seed{'s' * (seeds != 1)}: "
    pairs = by_csds("trl", runs)
    if not pairs:
        return head + "reward by time and by step"
    return f"{head}TRL alone takes\n{statistics.median(pairs):.1f} times csd's seconds a step"


def by_csds(side: str, runs: list[dict[str, Any]]) -> list[float]:
    """The median seconds of a side's step by csd's, for each seed that both have."""
    seconds = {(r["side"], r["seed"]): statistics.median(r["steps"]["seconds"]) for r in runs}
    seeds = sorted(seed for at, seed in seconds if at == side and ("csd", seed) in seconds)
    return [seconds[side, seed] / seconds["csd", seed] for seed in seeds]


def smooth(values: list[float]) -> list[float]:
    """Mean over the WIDTH steps around each, fewer at the ends."""
    half = WIDTH // 2
    return [statistics.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def elapsed(steps: dict[str, list]) -> list[float]:
    """Minutes from the start to the end of each step."""
    return [sum(steps["seconds"][: i + 1]) / 60 for i in range(len(steps["seconds"]))]
