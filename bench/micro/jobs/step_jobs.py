"""Jobs of a step's other operations at the engine's shapes: the call, bytes moved, and a check.

A job is built once for each set of distinct buffers. Its check compares the implementation with the
reference on copies, and raises AssertionError; it runs before the timing.
"""

import random
from dataclasses import replace
from functools import partial

import torch

from bench.lib.graphs import DEEP, SHALLOW
from bench.lib.kernel_shape import Shape
from bench.micro.jobs.attention_job import PAGE
from bench.micro.jobs.layer_jobs import rms_norm, rotary, swiglu
from bench.micro.jobs.step_state import (
    Sizes,
    State,
    StepJob,
    bytes_of,
    check_same,
    on_host,
    record_bytes,
)
from csd.kernels.ops import Ops, reference
from csd.state.context_table import GraphConfig

# graphs to draft from and insert into: shallow, deep, and the engine's default
GRAPHS = {
    f"orders {', '.join(map(str, config.orders))}, depth {config.max_depth}": config
    for config in (SHALLOW, DEEP, GraphConfig())
}

# steps that one call of the insertion's job inserts
STEPS = 8


def draft_tree(ops, shape, sizes, device, dtype, seed, graph):
    state = State(ops, shape, GRAPHS[graph], sizes, device, seed)

    def check():
        table, slots, _ = state.host()
        check_same(state.pool, reference().draft_tree(table, slots, sizes.rows, state.config))

    # per row: the row is written, and one entry of every order is read
    entry = record_bytes(state.table) // state.table.entry_group.shape[0]
    moved = record_bytes(state.pool) + sizes.rows * len(state.config.orders) * entry
    return StepJob(
        f"S={sizes.slots} M={sizes.rows} {graph}",
        moved,
        record_bytes(state.table),
        lambda: ops.draft_tree(state.table, state.slots, sizes.rows, state.config),
        check,
    )


def graph_insert(ops, shape, sizes, device, dtype, seed, graph):
    """Insertion of STEPS steps at different places of the texts, one after another.

    A step that is inserted twice would find all of its contexts. Therefore each round has new
    groups: the first slot of a group to reach a context allocates it, and its siblings merge into
    it.
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
        hosts = [[on_host(part) for part in step] for step in steps]
        for host in hosts:
            host[1].group_key[: sizes.groups] += sizes.groups
            reference().insert_observed(table, *host, state.config)
        call()
        check_same(state.table, table)
        new = (table.entry_group >= int(hosts[0][1].group_key[0])).sum()
        assert new > sizes.slots, f"{new} contexts were allocated"

    entry = record_bytes(state.table) // state.table.entry_group.shape[0]
    moved = 2 * sizes.rows * len(state.config.orders) * entry
    name = f"S={sizes.slots} M={sizes.rows} {graph}"
    return StepJob(name, moved, record_bytes(state.table), call, check, STEPS)


def verify(ops, shape, sizes, device, dtype, seed):
    state = State(ops, shape, GraphConfig(max_depth=8), sizes, device, seed)
    logits = state.logits(shape.vocab, dtype, seed)

    def check():
        _, slots, pool = state.host()
        verdict = ops.verify(logits, state.pool, state.slots)
        want = reference().verify(logits.cpu(), pool, slots)
        check_same(verdict, want)
        assert int(want.accept_count.sum()) > sizes.slots, "no draft was accepted"

    return StepJob(
        f"M={sizes.rows} V={shape.vocab}",
        # logits near a row's maximum are read twice, which is little here
        bytes_of(logits),
        bytes_of(logits),
        lambda: ops.verify(logits, state.pool, state.slots),
        check,
    )


def commit(ops, shape, sizes, device, dtype, seed, tokens=2):
    """Commit of two rows of every slot, in all layers."""
    L, K, D, S, M = shape.layers, shape.kv_heads, shape.head_dim, sizes.slots, sizes.rows
    generator = torch.Generator(device).manual_seed(seed)
    node_k, node_v = (
        torch.randn(L, M, K, D, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    k_pages, v_pages = (torch.zeros(L, S, PAGE, K, D, dtype=dtype, device=device) for _ in "kv")
    int32 = dict(dtype=torch.int32, device=device)
    slot_pages = torch.arange(S, **int32).flip(0)[:, None].contiguous()
    slot_len = torch.arange(S, **int32) % (PAGE - tokens)
    # the root and the last row of its slot
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
    return StepJob(name, moved, bytes_of(node_k, node_v, k_pages, v_pages), call, check)


def makers(ops: Ops, shape: Shape, sizes: Sizes, device, dtype) -> list[partial[StepJob]]:
    """Builders of jobs; each takes a seed and builds one job with its own buffers."""
    common = (ops, shape, sizes, device, dtype)
    made = [partial(f, *common, graph=g) for f in (graph_insert, draft_tree) for g in GRAPHS]
    return made + [partial(f, *common) for f in (verify, commit, rms_norm, rotary, swiglu)]
