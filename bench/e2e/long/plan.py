"""Rows of a run in the order of their importance, and estimates of their time.

The estimate is for SmolLM2-135M on 2 cores; the times of finished rows correct it for the others.
"""

from dataclasses import dataclass

CSD = ("csd", "csd without drafts")
VLLM = ("vLLM", "vLLM ngram")
LLAMA = ("llama.cpp", "llama.cpp, csd's dtype")
TRANSFORMERS = ("transformers generate", "transformers generate_batch")
PEERS = (*VLLM, *LLAMA, *TRANSFORMERS)
TASKS, LIMITS, SAMPLES = (
    ("worked problems", "programs", "rewriting"),
    (100, 300, 1000, 3000),
    (4, 8, 16),
)
# tokens per second at 8 samples; START: seconds to start a side
RATES = {
    "csd": 500,
    "csd without drafts": 500,
    "vLLM": 460,
    "vLLM ngram": 460,
    "llama.cpp": 220,
    "llama.cpp, csd's dtype": 220,
    "transformers generate": 140,
    "transformers generate_batch": 64,
}
START = 40
# mean length of a sample as a share of its limit
LENGTH = 0.65
# number of prompts in a row of kind "many", and samples of each
PROMPTS, OF_EACH = 16, 4


@dataclass(frozen=True)
class Cell:
    """One row: n samples of a task's prompt, up to a limit, drawn by alternating sides."""

    kind: str  # "one" prompt at a time, "many" at once, "recorded" samples
    task: str
    samples: int
    limit: int
    sides: tuple[str, ...] = CSD
    slots: int = 0  # samples in flight, for kind "many"

    @property
    def name(self) -> str:
        slots = f", {self.slots} slots" if self.slots else ""
        return f"{self.kind} {self.task}, N={self.samples}, limit {self.limit}{slots}"

    def seconds(self, pairs: int) -> float:
        """Returns the estimated seconds of all pairs."""
        if self.kind == "recorded":
            # two prompts, and a third of the speed, for a shape of half a billion parameters
            return pairs * 2 * 2 * self.samples * self.limit * LENGTH / (RATES["csd"] / 3)
        count = self.samples * (PROMPTS if self.kind == "many" else 1)
        live = self.slots or self.samples
        tokens, faster = count * self.limit * LENGTH, min((live / 8) ** 0.7, 2.0)
        return pairs * sum(tokens / (RATES[side] * faster) for side in self.sides)


def plan(full: bool, recorded: bool) -> list[Cell]:
    """Returns the cells: peers at N = 8 up to 1,000 tokens and at N = 1, 16; csd over the grid.

    Rows of many prompts are included. full: all sides over the whole grid.
    """
    every = (*CSD, *PEERS)
    cells = [Cell("one", "worked problems", 8, limit, every) for limit in (1000, 300, 100)]
    cells += [Cell("one", "worked problems", n, 300, every) for n in (16, 1)]
    cells += [Cell("many", "mixed", OF_EACH, 300, slots=slots) for slots in (16, 64)]
    if recorded:
        cells += [Cell("recorded", "rewrites", n, 250) for n in (8, 4)]
    cells.append(Cell("one", "worked problems", 8, 3000, (*CSD, "vLLM")))
    for limit in (300, 100, 1000):
        for task in TASKS:
            # long answers of further tasks have one number of samples only
            counts = SAMPLES if limit < 1000 or task == "worked problems" else (8,)
            cells += [Cell("one", task, n, limit) for n in counts]
    if full:
        wide = [
            Cell("one", t, n, limit, every)
            for t in TASKS
            for limit in LIMITS
            for n in (1, *SAMPLES)
        ]
        cells = [cell for cell in cells if cell.kind != "one"] + wide
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.name, cell)
    return list(first.values())


def supported(cells: list[Cell], sides: set[str]) -> list[Cell]:
    """Returns the cells, each restricted to the available sides."""
    return [
        Cell(c.kind, c.task, c.samples, c.limit, tuple(s for s in c.sides if s in sides), c.slots)
        for c in cells
    ]


def summary(cells: list[Cell], pairs: int) -> str:
    """Text with the cells and their estimated minutes."""
    lines = [f"{c.seconds(pairs) / 60:6.1f} min  {c.name:45} {', '.join(c.sides)}" for c in cells]
    total = sum(c.seconds(pairs) for c in cells) + START * len({s for c in cells for s in c.sides})
    return "\n".join([*lines, f"{total / 60:6.1f} min  in all, as SmolLM2-135M takes on 2 cores"])
