"""The pages of examples/, as they stand."""

import runpy
from pathlib import Path


def main_of(name: str):
    """The `main` of one of them."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / name))["main"]
