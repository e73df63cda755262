"""The other operations of a step at the engine's shapes: what to call, what moves, what is right.

A job is built as often as distinct buffers are needed. Its check compares the implementation with
the reference on copies, and raises AssertionError; it is made before anything is timed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from bench.lib.graphs import DEEP, SHALLOW
from bench.lib.kernel_shape import Shape
from bench.micro.attention_job import PAGE, error_of, limit_for
from csd.graph.consensus import insert_prompt
from csd.kernels.ops import Ops, reference
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.slots import Slots

# what is drafted and inserted: shallow, deep, and as the engine does
GRAPHS = {
    f"orders {', '.join(map(str, config.orders))}, depth {config.max_depth}": config
    for config in (SHALLOW, DEEP, GraphConfig())
}


# steps that a call of the insertion's job inserts
STEPS = 8


@dataclass(slots=True)
class StepJob:
    """moved: the least bytes an operation can move. footprint: bytes of the job's buffers."""

    size: str
    moved: int
    footprint: int
    call: Callable[[], object]
    check: Callable[[], None]
    operations: int = 1  # in one call


@dataclass(frozen=True, slots=True)
class Sizes:
    """S slots of `groups` prompts, M rows, and tokens of text behind every slot."""

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
            # a sample has its siblings' tokens except for a tenth
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
        """[S, N] int32, each slot's context at some place of its text."""
        N, ends = self.config.context, []
        for text in self.texts:
            at = rng.randrange(N, len(text))
            ends.append(text[at - N : at][::-1])
        return torch.tensor(ends, dtype=torch.int32, device=self.slots.context.device)

    def logits(self, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """[M, V], peaked; drafted children are likely, so that paths are accepted."""
        pool, device = self.pool, self.pool.token.device
        generator = torch.Generator(device).manual_seed(seed)
        x = 4 * torch.randn(pool.rows, vocab, generator=generator, device=device)
        child = pool.parent >= 0
        row = torch.where(child, pool.parent, 0).long()
        token = torch.where(child, pool.token, 0).long()
        boost = torch.zeros_like(x).index_put_((row, token), child * 20.0, accumulate=True)
        return (x + boost.clamp(max=20)).to(dtype)

    def host(self) -> tuple[Table, Slots, Pool]:
        """Copies on the CPU, for the reference."""
        return self.table.map(lambda x: x.cpu().clone()), _host(self.slots), _host(self.pool)


def _host(record):
    return type(record)(**{f.name: getattr(record, f.name).cpu().clone() for f in fields(record)})


def _same(got, want) -> None:
    """Two tables, pools or verdicts: integers equal, floats as close as two orders of summing."""
    for f in fields(want):
        a, b = getattr(got, f.name), getattr(want, f.name)
        if not isinstance(b, torch.Tensor):
            continue
        a = a.cpu()
        close = torch.allclose(a, b, rtol=1e-4, atol=1e-5) if b.is_floating_point() else False
        assert close or torch.equal(a, b), f"{type(want).__name__}.{f.name} differs"


def _near(got: torch.Tensor, exact: torch.Tensor) -> None:
    error, limit = error_of(got.cpu(), exact), limit_for(got.dtype)
    assert error <= limit, f"relative error {error:.1e}, at most {limit:.1e} allowed"


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _record_bytes(record) -> int:
    parts = [getattr(record, f.name) for f in fields(record)]
    return _bytes(*(x for x in parts if isinstance(x, torch.Tensor)))


def draft_tree(ops, shape, sizes, device, dtype, seed, graph):
    state = State(ops, shape, GRAPHS[graph], sizes, device, seed)

    def check():
        table, slots, _ = state.host()
        _same(state.pool, reference().draft_tree(table, slots, sizes.rows, state.config))

    # a row is written, and an entry of every order is read for it
    entry = _record_bytes(state.table) // state.table.entry_group.shape[0]
    moved = _record_bytes(state.pool) + sizes.rows * len(state.config.orders) * entry
    return StepJob(
        f"S={sizes.slots} M={sizes.rows} {graph}",
        moved,
        _record_bytes(state.table),
        lambda: ops.draft_tree(state.table, state.slots, sizes.rows, state.config),
        check,
    )


def graph_insert(ops, shape, sizes, device, dtype, seed, graph):
    """STEPS steps at different places of the texts, inserted in turn.

    A step that is inserted twice finds all of its contexts. So each round belongs to new groups:
    the first slot of a group to reach a context allocates it, and its siblings merge into it.
    """
    state = State(ops, shape, GRAPHS[graph], sizes, device, seed)
    steps = []
    for i in range(STEPS):
        if i:
            state.slots.context.copy_(state.ends(random.Random(seed * STEPS + i)))
            state.pool = ops.draft_tree(state.table, state.slots, sizes.rows, state.config)
        logits = state.logits(shape.vocab, torch.float32, seed)
        verdict = ops.verify(logits, state.pool, state.slots)
        slots = replace(state.slots, context=state.slots.context.clone())
        steps.append((state.pool, slots, verdict))
    groups = state.slots.group_key[: sizes.groups]

    def call():
        groups.add_(sizes.groups)
        for step in steps:
            ops.insert_observed(state.table, *step, state.config)

    def check():
        table, _, _ = state.host()
        hosts = [[_host(part) for part in step] for step in steps]
        for host in hosts:
            host[1].group_key[: sizes.groups] += sizes.groups
            reference().insert_observed(table, *host, state.config)
        call()
        _same(state.table, table)
        new = (table.entry_group >= int(hosts[0][1].group_key[0])).sum()
        assert new > sizes.slots, f"{new} contexts were allocated"

    entry = _record_bytes(state.table) // state.table.entry_group.shape[0]
    moved = 2 * sizes.rows * len(state.config.orders) * entry
    name = f"S={sizes.slots} M={sizes.rows} {graph}"
    return StepJob(name, moved, _record_bytes(state.table), call, check, STEPS)


def verify(ops, shape, sizes, device, dtype, seed):
    state = State(ops, shape, GraphConfig(max_depth=8), sizes, device, seed)
    logits = state.logits(shape.vocab, dtype, seed)

    def check():
        _, slots, pool = state.host()
        verdict = ops.verify(logits, state.pool, state.slots)
        want = reference().verify(logits.cpu(), pool, slots)
        _same(verdict, want)
        assert int(want.accept_count.sum()) > sizes.slots, "no draft was accepted"

    return StepJob(
        f"M={sizes.rows} V={shape.vocab}",
        # what lies near a row's maximum is read again, which here is little
        _bytes(logits),
        _bytes(logits),
        lambda: ops.verify(logits, state.pool, state.slots),
        check,
    )


def commit(ops, shape, sizes, device, dtype, seed, tokens=2):
    """Two of every slot's rows, in all layers."""
    L, K, D, S, M = shape.layers, shape.kv_heads, shape.head_dim, sizes.slots, sizes.rows
    generator = torch.Generator(device).manual_seed(seed)
    node_k, node_v = (
        torch.randn(L, M, K, D, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    k_pages, v_pages = (torch.zeros(L, S, PAGE, K, D, dtype=dtype, device=device) for _ in "kv")
    int32 = dict(dtype=torch.int32, device=device)
    slot_pages = torch.arange(S, **int32).flip(0)[:, None].contiguous()
    slot_len = torch.arange(S, **int32) % (PAGE - tokens)
    # a root and another row of its slot
    each = M // S
    place = torch.arange(tokens, **int32) * (each - 1)
    accept_row = torch.full((S, 17), -1, **int32)
    accept_row[:, :tokens] = torch.arange(S, **int32)[:, None] * each + place
    where = slot_pages, slot_len, accept_row, torch.full((S,), tokens, **int32)

    def call():
        ops.commit_kv(node_k, node_v, k_pages, v_pages, *where)

    def check():
        want = k_pages.clone(), v_pages.clone()
        reference().commit_kv(node_k, node_v, *want, *where)
        call()
        assert torch.equal(k_pages, want[0]) and torch.equal(v_pages, want[1]), "pages differ"
        assert k_pages.any(), "nothing was moved"

    moved = 4 * L * S * tokens * K * D * dtype.itemsize
    name = f"S={S} tokens={tokens} L={L}"
    return StepJob(name, moved, _bytes(node_k, node_v, k_pages, v_pages), call, check)


def rms_norm(ops, shape, sizes, device, dtype, seed):
    x, residual = (_normal(sizes.rows, shape.hidden, device, dtype, seed + i) for i in range(2))
    weight = _normal(1, shape.hidden, device, dtype, seed + 2)[0]

    def check():
        y, r = ops.rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(r, x + residual), "the sum differs"
        wide = r.cpu().double()
        exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.cpu().double()
        _near(y, exact)

    moved = 4 * _bytes(x) + _bytes(weight)
    name = f"M={sizes.rows} F={shape.hidden}"
    return StepJob(name, moved, moved, lambda: ops.rms_norm(x, weight, 1e-5, residual), check)


def rotary(ops, shape, sizes, device, dtype, seed):
    M, H, K, D = sizes.rows, shape.heads, shape.kv_heads, shape.head_dim
    qkv = _normal(M, (H + 2 * K) * D, device, dtype, seed)
    # rows of the three lie in one fused row, as the engine's do
    q, k, v = (
        x.view(M, -1, D) for x in qkv.split((H * D, K * D, K * D), dim=-1)
    )  # fmt: skip
    frequency = 1e4 ** (-torch.arange(D, device=device) / D)
    angle = torch.arange(4096, device=device)[:, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    position = (torch.arange(M, device=device) * 13 % 4096).int()
    node_k, node_v = (torch.empty(M, K, D, dtype=dtype, device=device) for _ in "kv")
    arguments = q, k, v, position, cos, sin, node_k, node_v

    def check():
        out = ops.rotary(*arguments)
        wide = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in arguments]
        exact = reference().rotary(*wide)
        _near(out, exact)
        _near(node_k, wide[6])
        assert torch.equal(node_v, v), "values differ"

    moved = 2 * _bytes(qkv) + 2 * M * D * dtype.itemsize
    name = f"M={M} H={H} K={K} D={D}"
    return StepJob(name, moved, moved, lambda: ops.rotary(*arguments), check)


def swiglu(ops, shape, sizes, device, dtype, seed):
    x = _normal(sizes.rows, 2 * shape.intermediate, device, dtype, seed)

    def check():
        _near(ops.swiglu(x), reference().swiglu(x.cpu().double()))

    moved = _bytes(x) * 3 // 2
    name = f"M={sizes.rows} F={shape.intermediate}"
    return StepJob(name, moved, moved, lambda: ops.swiglu(x), check)


def _normal(rows, width, device, dtype, seed) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device).to(dtype)


def makers(ops: Ops, shape: Shape, sizes: Sizes, device, dtype) -> list[partial[StepJob]]:
    """Functions of a seed; each builds one job in buffers of its own."""
    common = (ops, shape, sizes, device, dtype)
    made = [partial(f, *common, graph=g) for f in (graph_insert, draft_tree) for g in GRAPHS]
    return made + [partial(f, *common) for f in (verify, commit, rms_norm, rotary, swiglu)]
