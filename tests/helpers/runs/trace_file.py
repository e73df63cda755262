"""Recordings small enough to work out their results by hand."""

import json
from pathlib import Path


def trace_file(path: Path, *rows: dict) -> Path:
    """Writes a line of `csd record` for each row, which has its samples and what differs."""
    usual = {"prompt_ids": [1, 2], "temperature": 0.7}
    lines = [json.dumps({"problem": i} | usual | row) + "\n" for i, row in enumerate(rows)]
    path.write_text("".join(lines))
    return path
