"""What a step costs by its rows."""

import bisect
import time
from collections.abc import Callable


class CostModel:
    """Seconds of a step by its rows, linear between the measured sizes and beyond them."""

    def __init__(self, sizes: list[int], seconds: list[float]):
        if len(sizes) != len(seconds) or len(sizes) < 2:
            raise ValueError(
                f"seconds must be one per size, at least 2, got {len(seconds)} for {len(sizes)}"
            )
        self.sizes = sizes
        # noise aside, more rows never cost less
        self.seconds = [max(seconds[: i + 1]) for i in range(len(seconds))]

    def __call__(self, rows: int) -> float:
        i = min(max(bisect.bisect_left(self.sizes, rows), 1), len(self.sizes) - 1)
        (a, b), (ta, tb) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return max(ta + (tb - ta) * (rows - a) / (b - a), self.seconds[0])

    @classmethod
    def measure(cls, run: Callable[[int], None], sizes: list[int], repeats: int = 3) -> "CostModel":
        """Times `run(rows)` for every size, the sizes in turn, and keeps the least: what a busy
        machine adds says nothing of the size."""
        for size in (sizes[0], sizes[-1]):
            run(size)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(repeats):
            for size in sizes:
                start = time.perf_counter()
                run(size)
                times[size].append(time.perf_counter() - start)
        return cls(sizes, [min(times[size]) for size in sizes])
