"""A section of the benchmark: its file, its deadline, its rows."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.common import write


@dataclass
class Section:
    """Rows are on disk as soon as they are added, so a killed run keeps what it has."""

    name: str
    out: Path
    device: torch.device
    quick: bool
    box: float  # seconds
    rows: list[dict] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds until the box closes."""
        return self.box - (time.perf_counter() - self.start)

    def add(self, **row) -> None:
        self.rows.append(row)
        self.write("running")

    def skip(self, why: str) -> None:
        """Leave out what is missing here, and record the reason."""
        self.facts.setdefault("left out", []).append(why)
        print(f"  {self.name}: left out: {why}", flush=True)
        self.write("running")

    def write(self, status: str) -> None:
        data = {
            "section": self.name,
            "status": status,
            "seconds": round(time.perf_counter() - self.start, 1),
            "device": str(self.device),
            **self.facts,
            "rows": self.rows,
        }
        path = self.out / f"{self.name}.json"
        fresh = path.with_suffix(".part")
        write(data, fresh, indent=1)
        fresh.replace(path)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def clock(self, call) -> float:
        """Seconds of a call, the device's work included."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start
