"""Rows of a run in the order of their weight, and estimates of their time.

The estimate is of SmolLM2-135M on 2 cores; what finished rows took corrects it for the others.
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
# tokens per second at 8 samples; what a side takes to start, in seconds
RATES = {
    "csd": 500, "csd without drafts": 500, "vLLM": 460, "vLLM ngram": 460, "llama.cpp": 220,
    "llama.cpp, csd's dtype": 220, "transformers generate": 140,
    "transformers generate_batch": 64,
}  # fmt: skip
START = 40
# of a limit, the mean length of what is drawn with it
LENGTH = 0.65
# the row of many prompts: so many, samples of each
PROMPTS, OF_EACH = 16, 4


@dataclass(frozen=True)
class Cell:
    """One row: n samples of a prompt of a task, up to a limit, by some sides in turns."""

    kind: str  # "one" prompt at a time, "many" at once, "recorded" samples
    task: str
    samples: int
    limit: int
    sides: tuple[str, ...] = CSD
    slots: int = 0  # in flight, where there are many prompts

    @property
    def name(self) -> str:
        slots = f", {self.slots} slots" if self.slots else ""
        return f"{self.kind} {self.task}, N={self.samples}, limit {self.limit}{slots}"

    def seconds(self, pairs: int) -> float:
        """Estimated seconds of all pairs."""
        if self.kind == "recorded":
            # of a shape of half a billion parameters: so many prompts, a third of the pace
            return pairs * 2 * 2 * self.samples * self.limit * LENGTH / (RATES["csd"] / 3)
        count = self.samples * (PROMPTS if self.kind == "many" else 1)
        live = self.slots or self.samples
        tokens, faster = count * self.limit * LENGTH, min((live / 8) ** 0.7, 2.0)
        return pairs * sum(tokens / (RATES[side] * faster) for side in self.sides)


def plan(full: bool, recorded: bool) -> list[Cell]:
    """The peers at N = 8 up to 1,000 tokens and at N = 1 and 16, csd over the grid, many prompts.

    full: all sides over the whole grid.
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
            # of the long ones one number of samples for each further task
            counts = SAMPLES if limit < 1000 or task == "worked problems" else (8,)
            cells += [Cell("one", task, n, limit) for n in counts]
    if full:
        wide = [Cell("one", t, n, limit, every)
                for t in TASKS for limit in LIMITS for n in (1, *SAMPLES)]  # fmt: skip
        cells = [cell for cell in cells if cell.kind != "one"] + wide
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.name, cell)
    return list(first.values())


def kept(cells: list[Cell], sides: set[str]) -> list[Cell]:
    """The cells with those of their sides that are at hand."""
    return [
        Cell(c.kind, c.task, c.samples, c.limit, tuple(s for s in c.sides if s in sides), c.slots)
        for c in cells
    ]


def summary(cells: list[Cell], pairs: int) -> str:
    """The cells and their estimated minutes, for a person."""
    lines = [f"{c.seconds(pairs) / 60:6.1f} min  {c.name:45} {', '.join(c.sides)}" for c in cells]
    total = sum(c.seconds(pairs) for c in cells) + START * len({s for c in cells for s in c.sides})
    return "\n".join([*lines, f"{total / 60:6.1f} min  in all, as SmolLM2-135M takes on 2 cores"])
