"""The sections in the order of their value, and the time box of each in seconds.

Sections of one step run side by side. A step's box closes at the sum of the boxes up to it, so
unused time goes to later steps, and all of them end within the given minutes.
"""

import math
from dataclasses import dataclass

# boxes in a run of 10 minutes, and of 30; a section with a box of 0 is left out
BOXES = {
    "doctor": (120, 160),
    "compile": (120, 160),
    "products": (25, 40),
    "parity": (110, 180),
    "end_to_end": (150, 400),
    "attention": (45, 170),
    "continuous": (40, 120),
    "vllm": (0, 280),
    "checkpoint": (35, 150),
    "prefill": (25, 40),
    "first_call": (35, 60),
    "outside": (0, 60),
    "drafters": (0, 55),
    "equality": (0, 65),
}
MINUTES = (10, 30)
# compilation and checks of kernels use different parts of a machine
SIDE_BY_SIDE = ("doctor", "compile")


@dataclass(frozen=True)
class Step:
    """Sections that run side by side."""

    sections: list[str]
    closes: int  # second of the run at which their box closes
    call: int = 0  # of a lent machine (`bench.gpu.calls`) whose sections these are; 0: of none
    least: float = -math.inf  # seconds; with fewer left, the step is left out


def box(name: str, minutes: int) -> int:
    """Seconds of a section's box; a section that a short run leaves out has its long box."""
    return BOXES[name][MINUTES.index(minutes)] or BOXES[name][-1]


def chosen(minutes: int, only: list[str] | None = None) -> list[str]:
    """Names of the sections of a run, in order."""
    return [
        name
        for name, boxes in BOXES.items()
        if (name in only if only else boxes[MINUTES.index(minutes)])
    ]


def steps(names: list[str], minutes: int) -> list[Step]:
    """Steps of a run of the sections `names`."""
    planned: list[Step] = []
    closes = 0
    for name in names:
        if planned and name in SIDE_BY_SIDE and planned[-1].sections[-1] in SIDE_BY_SIDE:
            planned[-1].sections.append(name)
            continue
        closes += box(name, minutes)
        planned.append(Step([name], closes))
    return planned
