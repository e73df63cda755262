"""A section of the benchmark: its file, deadline and rows."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.lib.common import write
from csd.kernels.common.gpu import has_bfloat16


@dataclass
class Section:
    """A section's rows, which are written to disk when added, so that a killed run keeps them."""

    name: str
    out: Path
    device: torch.device
    box: float  # seconds
    minutes: int = 10  # of the whole run
    vllm: str | None = None  # the interpreter of an environment that has vLLM
    call: int = 0  # of a lent machine (`bench.gpu.calls`), which has less time; 0: of none
    rows: list[dict] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    cut: bool = False  # True if the time was too short for all rows
    start: float = field(default_factory=lambda: time.perf_counter())

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The models' dtype: float32 on a CPU, float16 on a GPU without bfloat16 arithmetic."""
        if not self.cuda:
            return torch.float32
        return torch.bfloat16 if has_bfloat16(self.device) else torch.float16

    @property
    def left(self) -> float:
        """Seconds until the box closes."""
        return self.box - (time.perf_counter() - self.start)

    def add(self, **row) -> None:
        self.rows.append(row)
        self.write("running")

    def skip(self, why: str) -> None:
        """Record why something that this machine lacks is left out."""
        self.facts.setdefault("left out", []).append(why)
        print(f"  {self.name}: left out: {why}", flush=True)
        self.write("running")

    def cut_off(self, why: str) -> None:
        """Record what is left out for lack of time; the section then counts as cut."""
        self.cut = True
        self.skip(f"no time: {why}")

    def end(self) -> None:
        self.write("cut" if self.cut else "done")

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
        """Seconds of a call, including the device's work."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start
