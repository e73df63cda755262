"""Output of every benchmark: the machine, a table, and one JSON object, printed last and saved."""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.lib.processor import processor

# load averages of the last 1, 5 and 15 minutes, before the benchmark's own load
LOAD = [round(x, 2) for x in os.getloadavg()]


def machine() -> dict:
    """Machine and versions of a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # a copy of the repository without .git
        commit = os.environ.get("CSD_COMMIT")
    return {
        "gpu": gpu,
        **processor(),
        "load": LOAD,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "commit": commit,
    }


def traced(error: BaseException) -> str:
    """The end of an error's traceback, for a result file."""
    return "".join(traceback.format_exception(error))[-6000:]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(result: dict, path: str | Path | None, indent: int | None = None) -> dict:
    """Add this machine's entry to `result` and write it to `path`, if given; returns it.

    Every result file is written here, since its figures cannot be compared without the entry.
    """
    result = result | {"machine": machine()}
    if path:
        Path(path).write_text(json.dumps(result, indent=indent) + "\n")
    return result


def bootstrap(values: list[float], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% interval of the median of `values`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(values, dtype=torch.float64)
    pick = torch.randint(len(values), (draws, len(values)), generator=generator)
    medians = x[pick].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """Median of the pairs' ratios with its 95% interval."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), *bootstrap(ratios)


def table(rows: list[dict]) -> str:
    """Rows as aligned text, with a column for every key, empty for rows without the key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[_cell(r.get(n, "")) for n in names] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(names))]
    lines = ["  ".join(x.rjust(w) for x, w in zip(c, widths, strict=True)) for c in cells]
    return "\n".join(lines)


def _cell(x) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def merged(old: list[dict], new: list[dict], fields: tuple[str, ...]) -> list[dict]:
    """Returns the rows of both; a new row replaces an old one that has equal `fields`."""
    named = {tuple(r[f] for f in fields): r for r in [*old, *new]}
    return list(named.values())


def drafting(nodes: str) -> dict:
    """Options of `csd.generate` for a number of drafted tokens per step, "auto" or "none"."""
    if nodes == "none":
        return {"speculate": False}
    return {"budget": nodes if nodes == "auto" else int(nodes)}


def finish(result: dict, path: str | Path | None = None) -> None:
    """Print the result as one JSON object on the last line, and write it to `path`."""
    print(json.dumps(write(result, path)))
    sys.stdout.flush()


def interval(statistic, count: int, draws: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of statistic(list of problem indices)."""
    rng = random.Random(0)
    resampled = sorted(statistic(rng.choices(range(count), k=count)) for _ in range(draws))
    return resampled[int(0.025 * draws)], resampled[int(0.975 * draws)]
