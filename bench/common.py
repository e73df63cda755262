"""What every benchmark prints: the machine, a table, one JSON object last."""

import json
import os
import platform
import subprocess
import sys

import torch


def machine() -> dict:
    """Where and with what a figure was taken."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # a copy without its history
        commit = os.environ.get("CSD_COMMIT")
    return {
        "gpu": gpu,
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


def bootstrap(values: list[float], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% interval of the median of `values`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(values, dtype=torch.float64)
    pick = torch.randint(len(values), (draws, len(values)), generator=generator)
    medians = x[pick].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def table(rows: list[dict]) -> str:
    """Rows with the same keys as aligned text."""
    names = list(rows[0])
    cells = [names] + [[_cell(r[n]) for n in names] for r in rows]
    widths = [max(len(c[i]) for c in cells) for i in range(len(names))]
    lines = ["  ".join(x.rjust(w) for x, w in zip(c, widths, strict=True)) for c in cells]
    return "\n".join(lines)


def _cell(x) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def finish(result: dict, path: str | None) -> None:
    """Print the result as one JSON object on the last line, and write it where asked."""
    text = json.dumps(result)
    if path:
        with open(path, "w") as f:
            f.write(text + "\n")
    print(text)
    sys.stdout.flush()
