"""An engine's state in the middle of a call, for jobs that time a step's operations."""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from bench.lib.kernel_shape import Shape
from bench.micro.jobs.attention_job import error_of, limit_for
from csd.graph.consensus import insert_prompt
from csd.kernels.ops import Ops
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.record import declared
from csd.state.slots import Slots


@dataclass(slots=True)
class StepJob:
    """One operation to check and time.

    moved: the least bytes that the operation can move. footprint: bytes of the job's buffers.
    """

    size: str
    moved: int
    footprint: int
    call: Callable[[], object]
    check: Callable[[], None]
    operations: int = 1  # number of operations in one call


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a state: slots, prompts (`groups`), rows, and tokens of text of every slot."""

    slots: int = 64
    groups: int = 4
    rows: int = 256
    text: int = 512


class State:
    """An engine's state in the middle of a call: texts in the graph, live slots, a drafted pool."""

    def __init__(self, ops: Ops, shape: Shape, config: GraphConfig, sizes: Sizes, device, seed=0):
        rng = random.Random(seed)
        S, each = sizes.slots, -(-sizes.slots // sizes.groups)
        self.ops, self.config = ops, config
        self.table = Table.empty(config, device)
        self.slots = slots = Slots.empty(S, shape.vocab, 4096, config.context, device=device)
        slots.group_key[: sizes.groups] = torch.arange(sizes.groups, device=device)
        words = [rng.randrange(shape.vocab) for _ in range(min(2000, shape.vocab))]
        self.texts: list[list[int]] = []
        for s in range(S):
            if s % each == 0:
                text = [rng.choice(words) for _ in range(sizes.text)]
            # a sample has its group's text with a tenth of the tokens replaced
            own = [t if rng.random() < 0.9 else rng.choice(words) for t in text]
            tokens = torch.tensor(own, dtype=torch.int32, device=device)
            insert_prompt(self.table, s // each, tokens, slots.group_key, config, ops.graph_insert)
            self.texts.append(own)
        slots.context.copy_(self.ends(rng))
        slots.group.copy_(torch.tensor([s // each for s in range(S)], dtype=torch.int32))
        slots.sample.copy_(torch.arange(S) % each)
        slots.key.copy_(slots.group.long() + 1)
        slots.temperature.fill_(0.7)
        slots.max_new.fill_(4096)
        slots.live.fill_(True)
        self.rows = sizes.rows
        self.pool = ops.draft_tree(self.table, slots, sizes.rows, config)

    def ends(self, rng: random.Random) -> torch.Tensor:
        """Contexts [S, N] int32 at a random position of each slot's text."""
        N, ends = self.config.context, []
        for text in self.texts:
            at = rng.randrange(N, len(text))
            ends.append(text[at - N : at][::-1])
        return torch.tensor(ends, dtype=torch.int32, device=self.slots.context.device)

    def logits(self, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Peaked logits [M, V]: drafted children are likely, so that paths are accepted."""
        pool, device = self.pool, self.pool.token.device
        generator = torch.Generator(device).manual_seed(seed)
        x = 4 * torch.randn(pool.rows, vocab, generator=generator, device=device)
        child = pool.parent >= 0
        row = torch.where(child, pool.parent, 0).long()
        token = torch.where(child, pool.token, 0).long()
        boost = torch.zeros_like(x).index_put_((row, token), child * 20.0, accumulate=True)
        return (x + boost.clamp(max=20)).to(dtype)

    def host(self) -> tuple[Table, Slots, Pool]:
        """Copies of table, slots and pool on the CPU, for the reference."""
        return self.table.map(lambda x: x.cpu().clone()), on_host(self.slots), on_host(self.pool)


def on_host(record):
    names = declared(type(record))
    return type(record)(**{name: getattr(record, name).cpu().clone() for name in names})


def check_same(got, want) -> None:
    """Assert that two tables, pools or verdicts agree: integers exactly, floats up to rounding."""
    for f in fields(want):
        a, b = getattr(got, f.name), getattr(want, f.name)
        if not isinstance(b, torch.Tensor):
            continue
        a = a.cpu()
        close = torch.allclose(a, b, rtol=1e-4, atol=1e-5) if b.is_floating_point() else False
        assert close or torch.equal(a, b), f"{type(want).__name__}.{f.name} differs"


def check_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    error, limit = error_of(got.cpu(), exact), limit_for(got.dtype)
    assert error <= limit, f"relative error {error:.1e}, at most {limit:.1e} allowed"


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def record_bytes(record) -> int:
    parts = [getattr(record, f.name) for f in fields(record)]
    return bytes_of(*(x for x in parts if isinstance(x, torch.Tensor)))
