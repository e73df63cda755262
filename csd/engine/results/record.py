"""Result of a step as the host reads it: one small bundle, copied off the device.

A `Snapshot` on the device becomes a `Record` on the host, `PendingRecord` while it is copied. With
`drafts=True` a record has the draft trees of the step (`Trees`).
"""

from dataclasses import dataclass, field
from math import prod

import torch

from csd.kernels.verify.layout import layout
from csd.state.pool import Pool, acceptance, path_probability
from csd.state.verdict import Verdict

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
    """Draft trees of all slots of a step, on the host: lists per slot [S] or pool row [M].

    Fields are named as in the snapshot's layout. count: accepted rows, with the root.
    """

    start: list[int]
    nodes: list[int]
    token: list[int]
    parent: list[int]
    path_cost: list[int]
    source: list[int]
    accept_row: list[list[int]]
    count: list[int]

    def draft(self, slot: int, step: int, at: int) -> Draft:
        start = self.start[slot]
        rows = slice(start, start + self.nodes[slot])
        accepted = self.accept_row[slot][1 : self.count[slot]]
        return Draft(
            step=step,
            at=at,
            tokens=self.token[rows],
            parents=[row - start if row >= 0 else -1 for row in self.parent[rows]],
            probabilities=[round(path_probability(cost), 6) for cost in self.path_cost[rows]],
            sources=[SOURCES[source] for source in self.source[rows]],
            path=[row - start for row in accepted],
        )


# optional fields
MEASURED = ("likely_token", "likely_logprob", "entropy")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Result of a step on the device, in tensors of fixed shapes.

    All integers are in one tensor and all floats in another, so two copies bring them to the host;
    `layout` has every field's name, shape and offset.
    """

    layout: tuple
    ints: torch.Tensor
    floats: torch.Tensor
    shared: list[int] | None = None  # rows of the model by slot, if slots share them

    @property
    def rows(self) -> int:
        """Rows of the model that the step ran, padding included."""
        if self.shared is not None:
            return sum(self.shared)
        return next(shape[0] for part in self.layout for name, shape, _ in part if name == "cost")

    @classmethod
    def of(
        cls,
        pool: Pool,
        verdict: Verdict,
        tensors: tuple[torch.Tensor, torch.Tensor],
        top: bool,
        trees: bool,
        more: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None,
    ) -> "Snapshot":
        """Lay out a step's result. tensors: integers and floats of `csd.kernels.snapshot`.

        more: further integer and float fields, by name, that are appended.
        """
        (S, A), M = verdict.accept_row.shape, pool.token.shape[0]
        fields = layout(S, M, A, top, trees)
        shared = None if pool.texts is None else pool.texts.rows.slot_nodes.tolist()
        if more is None:
            return cls(fields, *tensors, shared=shared)
        extended = [_with(*each) for each in zip(fields, tensors, more, strict=True)]
        (of_ints, ints), (of_floats, floats) = extended
        return cls((of_ints, of_floats), ints, floats, shared)


def _with(
    fields: tuple, values: torch.Tensor, more: dict[str, torch.Tensor]
) -> tuple[tuple, torch.Tensor]:
    """Append the fields of `more` to a layout and its flat tensor; returns both."""
    offset, added = values.numel(), []
    for name, x in more.items():
        added.append((name, tuple(x.shape), offset))
        offset += x.numel()
    parts = [values, *(x.reshape(-1).to(values.dtype) for x in more.values())]
    return (*fields, *added), torch.cat(parts)


@dataclass(slots=True)
class Record:
    """A step's result on the host: lists over the S slots, with count 0 for a slot without rows."""

    owners: list  # csd.engine.requests.request.LiveSample or None for each slot, during the step
    count: list[int]
    nodes: list[int]  # rows of the slot, root included
    finish: list[int]
    bad: list[bool]
    tokens: list[list[int]]  # [S, A]
    logprobs: list[list[float]]
    raw_logprobs: list[list[float]]
    sources: list[list[int]]  # source of the drafted node that each token matched, ROOT if none
    costs: list[int]  # costs of the drafted nodes, as in `Pool.cost`
    top: tuple[list, list] | None  # token and probability lists [S, A, 8], with record=
    step: int  # number of the step in the call, from 1
    trees: Trees | None  # with drafts=True
    rows: int  # rows of the model that the step ran, padding included
    # lists [S, A, ..] of `csd.engine.results.logprobs`, by name
    measured: dict[str, list] = field(default_factory=dict)
    # draft_seconds: proposing and inserting, without deferred inserts of previous steps;
    # model_seconds: all other phases. A static step is timed as a whole, all as model_seconds
    draft_seconds: float = 0.0
    model_seconds: float = 0.0
    shared: list[int] | None = None  # as in `Snapshot`

    @classmethod
    def read(cls, owners: list, step: int, snapshot: Snapshot) -> "Record":
        """Unpack the snapshot of a step."""
        got: dict[str, list] = {}
        tensors = snapshot.ints.cpu(), snapshot.floats.cpu()
        for fields, values in zip(snapshot.layout, tensors, strict=True):
            for name, shape, offset in fields:
                got[name] = values[offset : offset + prod(shape)].view(shape).tolist()
        return cls(
            owners=owners,
            count=got["count"],
            nodes=got["nodes"],
            finish=got["finish"],
            bad=[bool(x) for x in got["bad"]],
            tokens=got["tokens"],
            logprobs=got["logprobs"],
            raw_logprobs=got["raw_logprobs"],
            sources=got["sources"],
            costs=[x for x in got["cost"] if x >= 0],
            top=(got["top_token"], got["top_prob"]) if "top_token" in got else None,
            step=step,
            trees=Trees(*(got[name] for name in Trees.__slots__)) if "token" in got else None,
            rows=snapshot.rows,
            measured={name: got[name] for name in MEASURED if name in got},
            shared=snapshot.shared,
        )

    @property
    def expected(self) -> float:
        """Expected number of accepted drafted tokens, computed from their costs."""
        return sum(map(acceptance, self.costs))

    @property
    def model_rows(self) -> list[int]:
        """Rows of the model of each slot; those that slots share are of the first of them."""
        return self.nodes if self.shared is None else self.shared

    @property
    def roots(self) -> int:
        """Rows of the model that such a step runs without drafts."""
        return sum(rows > 0 for rows in self.model_rows)

    @property
    def accepted(self) -> int:
        """Number of accepted drafted tokens."""
        return sum(max(count - 1, 0) for count in self.count)


@dataclass(slots=True)
class PendingRecord:
    """Snapshot of a launched step, while it is copied to the host."""

    owners: list
    step: int
    snapshot: Snapshot
    # CUDA events with timing: before the step, and after its copies
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    draft_seconds: float = 0.0
    model_seconds: float = 0.0

    def read(self) -> Record:
        """Wait for the copy and unpack it."""
        if self.done is not None:
            self.done.synchronize()
            if self.begun is not None:
                # milliseconds on the device; both events have passed, so this does not wait
                self.model_seconds = self.begun.elapsed_time(self.done) / 1000
        record = Record.read(self.owners, self.step, self.snapshot)
        record.draft_seconds, record.model_seconds = self.draft_seconds, self.model_seconds
        return record
