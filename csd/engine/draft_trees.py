"""Draft trees of a step, recorded with `drafts=True`."""

from dataclasses import dataclass

from csd.state.pool import path_probability

# names of the source codes in `csd.state.pool`
SOURCES = ("", "own", "sibling", "prompt", "history", "model", "prior")


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tree of a sample in a step: lists over its nodes, root (its last token) first."""

    step: int  # of the call, from 1
    at: int  # number of tokens of the sample before the step
    tokens: list[int]
    parents: list[int]  # -1 for the root
    probabilities: list[float]  # estimated path probabilities; 1 for the root
    sources: list[str]  # as in `Sample.sources`; "" for the root
    path: list[int]  # the nodes that were accepted, in order


@dataclass(slots=True)
class Trees:
    """Draft trees of all slots of a step, on the host: lists per slot [S] or pool row [M]."""

    start: list[int]
    nodes: list[int]
    token: list[int]
    parent: list[int]
    cost: list[int]
    source: list[int]
    accept_row: list[list[int]]
    accept_count: list[int]

    def draft(self, slot: int, step: int, at: int) -> Draft:
        start = self.start[slot]
        rows = slice(start, start + self.nodes[slot])
        accepted = self.accept_row[slot][1 : self.accept_count[slot]]
        return Draft(
            step=step,
            at=at,
            tokens=self.token[rows],
            parents=[row - start if row >= 0 else -1 for row in self.parent[rows]],
            probabilities=[round(path_probability(cost), 6) for cost in self.cost[rows]],
            sources=[SOURCES[source] for source in self.source[rows]],
            path=[row - start for row in accepted],
        )
