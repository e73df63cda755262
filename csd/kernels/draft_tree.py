"""Draft every live slot's tree from the consensus graph: one pool of the likeliest nodes.

A node's contexts of all orders are looked up, and last the one of the group as a whole: what its
samples have said after anything (order 0). With W_n the total of its context of order n, w_n(t)
the weight of successor t, c the smoothing weight and L the most that is trusted, longest first:

    lam_n = L * W_n / (W_n + c)                     0 where the context is absent
    share_n = lam_n * product of (1 - lam_m) over the longer orders m
    p(t) = sum over n of share_n * p_n(t)

and the node keeps its MAX_CHILDREN likeliest tokens, ties to smaller tokens. p_n(t) = w_n(t) / W_n
where the slot is greedy. Where it samples, a context's successors are scored with the very noise g
that will decide, more sharply in longer contexts (beta_n):

    c_n(t) = exp(beta_n (log v_n(t) + g_t)) / (sum over s of the same
                                             + exp(beta_n (log max(r_n, 1/1000) + 0.577)))
    p_n(t) = (1 - u) c_n(t) + u v_n(t)

with r_n = 1 - sum of w_n(s) / W_n, v_n(t) the weights as shares of W_n, those of successors that
the sample itself has had there multiplied by `own_weight` at the same sum, and u the `uncoupled`
share. A mixture of coupled contexts guesses better than coupling their mixture: each of them
either is where the sample stands, and then its distribution is nearly right, or it is not. So it
is inside a context: its weights are a sum of distributions, of which the sample's may be a sharp
one that noise would not change; u stands for those.

Every term of p is rounded down to a multiple of 2^-24, so that sums are exact. An edge costs
round(-log2(p) * 2^16) and the same for `decay`, a path the sum of its edges, so a child never costs
less than its parent. Neither tokens that end the sample nor paths less likely than 2^-60 are
drafted.

Level by level, a slot's `frontier` cheapest nodes are expanded (ties: token, then the parent's
rank). Of all nodes seen, at most MAX_NODES - 1 a slot, the cheapest fill the pool's rows that the
roots leave, with `csd.pool.head_starts` added to their costs, so that samples that are behind get
more of them while the call waits for these alone; ties go by slot, depth, token and the parent's
rank. Probabilities and noise are float64 before an edge is rounded, so that implementations whose
logarithms differ in the last bit reach the same integers but for one edge in 10^9.
"""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
import triton

from csd.graph.table import GraphConfig, Table
from csd.kernels.aot import DEEP, SHALLOW, Job, Shape
from csd.kernels.checks import check_fields
from csd.kernels.draft_fill_kernel import _fill_kernel
from csd.kernels.draft_grow_kernel import _grow_kernel
from csd.kernels.draft_tree_ref import Noise, draft_tree_ref, max_path_cost
from csd.kernels.graph_lookup_kernel import hash_factors
from csd.pool import MAX_CHILDREN, MAX_DEPTH, MAX_NODES, Pool
from csd.slots import MAX_STOP_IDS, Slots

__all__ = ["Noise", "draft_tree", "draft_tree_ref", "draft_tree_triton"]

# slots read at once
BLOCK_S, FILL_S = 16, 64
GROW_WARPS, FILL_WARPS = 8, 4


def draft_tree_triton(
    table: Table,
    slots: Slots,
    rows: int,
    config: GraphConfig,
    noise: None = None,
    out: Pool | None = None,
    nodes: int | None = None,
) -> Pool:
    """Two launches: every slot's tree, then the pool."""
    if noise is not None:
        raise ValueError("noise must be None: the kernel draws the slots' own")
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    E = table.succ_token.shape[1]
    device = slots.live.device
    pool = out or _empty_pool(rows, S, G, N, device)
    most = rows if nodes is None else nodes
    lists = torch.empty((S, MAX_NODES), dtype=torch.int64, device=device)
    block_n, block_f = triton.next_power_of_2(N), triton.next_power_of_2(config.frontier)
    children = torch.empty((S, block_f * MAX_CHILDREN), dtype=torch.int64, device=device)
    _grow_kernel[(S,)](
        live_ptr=slots.live,
        group_ptr=slots.group,
        key_ptr=slots.key,
        sample_ptr=slots.sample,
        generated_ptr=slots.generated,
        pace_ptr=slots.pace,
        max_new_ptr=slots.max_new,
        temperature_ptr=slots.temperature,
        context_ptr=slots.context,
        stop_ids_ptr=slots.stop_ids,
        group_key_ptr=slots.group_key,
        entry_group_ptr=table.entry_group,
        entry_hash_ptr=table.entry_hash,
        entry_tokens_ptr=table.entry_tokens,
        entry_total_ptr=table.entry_total,
        succ_token_ptr=table.succ_token,
        succ_weight_ptr=table.succ_weight,
        succ_source_ptr=table.succ_source,
        nodes_ptr=lists,
        children_ptr=children,
        slots=S,
        rows=rows,
        most=most,
        buckets=table.buckets,
        max_depth=min(config.max_depth, MAX_DEPTH),
        max_cost=max_path_cost(config),
        N=N,
        BLOCK_N=block_n,
        ORDERS=config.orders[::-1],
        BLOCK_O=triton.next_power_of_2(len(config.orders) + 1),
        HASH=hash_factors(N),
        WAYS=table.ways,
        E=E,
        BLOCK_E=triton.next_power_of_2(E),
        SMOOTHING=float(config.smoothing),
        TRUST=config.trust,
        OWN_WEIGHT=float(config.own_weight),
        BETAS=config.betas,
        UNCOUPLED=config.uncoupled,
        LEVEL_COST=config.level_cost,
        FRONTIER=config.frontier,
        BLOCK_F=block_f,
        STOPS=MAX_STOP_IDS,
        BLOCK_S=BLOCK_S,
        num_warps=GROW_WARPS,
    )
    _fill_kernel[(max(S, G + 1),)](
        nodes_ptr=lists,
        live_ptr=slots.live,
        group_ptr=slots.group,
        generated_ptr=slots.generated,
        pace_ptr=slots.pace,
        slot_context_ptr=slots.context,
        prompt_len_ptr=slots.prompt_len,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        position_ptr=pool.position,
        ancestors_ptr=pool.ancestors,
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        context_ptr=pool.context,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        group_start_ptr=pool.group_start,
        slots=S,
        groups=G,
        rows=rows,
        most=most,
        N=N,
        BLOCK_N=block_n,
        BLOCK_S=FILL_S,
        num_warps=FILL_WARPS,
    )
    return pool


def _empty_pool(rows: int, slots: int, groups: int, context: int, device: torch.device) -> Pool:
    """Room for a pool; unlike `Pool.empty`, nothing is written."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Pool(
        token=empty(rows),
        parent=empty(rows),
        slot=empty(rows),
        depth=empty(rows),
        position=empty(rows),
        ancestors=empty(rows, dtype=torch.int64),
        cost=empty(rows),
        source=empty(rows),
        context=empty(rows, context),
        slot_start=empty(slots),
        slot_nodes=empty(slots),
        group_start=empty(groups + 1),
    )


_TABLE = tuple(f.name for f in fields(Table) if f.name != "ways")
_SLOTS = (
    "live", "group", "key", "sample", "generated", "max_new", "temperature", "context", "stop_ids",
    "pace", "prompt_len", "group_key",
)  # fmt: skip
# what drafting reads of a GraphConfig beside its sizes
_CONFIG = (
    "smoothing", "trust", "own_weight", "beta", "beta_order", "uncoupled", "decay", "frontier",
    "max_depth", "min_prob",
)  # fmt: skip


@torch.library.custom_op("csd::draft_tree", mutates_args=(), device_types="cpu")
def _draft_tree(
    table: list[torch.Tensor],
    slots: list[torch.Tensor],
    rows: int,
    ways: int,
    orders: list[int],
    smoothing: int,
    trust: float,
    own_weight: float,
    beta: float,
    beta_order: float,
    uncoupled: float,
    decay: float,
    frontier: int,
    max_depth: int,
    min_prob: float,
    nodes: int,
) -> list[torch.Tensor]:
    return _draft(draft_tree_ref, table, slots, rows, ways, orders, smoothing, trust, own_weight,
                  beta, beta_order, uncoupled, decay, frontier, max_depth, min_prob,
                  nodes)  # fmt: skip


@_draft_tree.register_kernel("cuda")
def _(table: list[torch.Tensor], slots: list[torch.Tensor], *args: Any) -> Any:
    with torch.cuda.device_of(slots[0]):
        return _draft(draft_tree_triton, table, slots, *args)


@_draft_tree.register_fake
def _(table: list[torch.Tensor], slots: list[torch.Tensor], rows: int, *args: Any) -> Any:
    live, context, group_key = (slots[_SLOTS.index(x)] for x in ("live", "context", "group_key"))
    sizes = live.shape[0], group_key.shape[0], context.shape[1]
    return _tensors(_empty_pool(rows, *sizes, live.device))


def _draft(
    run: Callable,
    table: list[torch.Tensor],
    slots: list[torch.Tensor],
    rows: int,
    ways: int,
    orders: list[int],
    *drafting: Any,
) -> list[torch.Tensor]:
    *values, nodes = drafting
    graph = Table(ways, *table)
    state = SimpleNamespace(count=slots[0].shape[0], **dict(zip(_SLOTS, slots, strict=True)))
    config = GraphConfig(
        orders=tuple(orders), capacity=graph.entry_group.shape[0], ways=ways,
        successors=graph.succ_token.shape[1], **dict(zip(_CONFIG, values, strict=True)),
    )  # fmt: skip
    return _tensors(run(graph, state, rows, config, nodes=nodes))


def _tensors(pool: Pool) -> list[torch.Tensor]:
    return [getattr(pool, f.name) for f in fields(Pool)]


def draft_tree(
    table: Table, slots: Slots, rows: int, config: GraphConfig, nodes: int | None = None
) -> Pool:
    """The likeliest nodes of all live slots' trees, in a pool of `rows` >= live rows.

    nodes: drafted nodes at most, over all slots; as many as fit when not given.
    """
    device, sizes = slots.live.device, {"S": slots.count}
    check_fields("table", table, _TABLE, sizes, device)
    check_fields("slots", slots, _SLOTS, sizes, device)
    N, E = sizes["N"], sizes["E"]
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if nodes is not None and nodes < 0:
        raise ValueError(f"nodes must be at least 0, got {nodes}")
    if config.context > N:
        raise ValueError(f"config.orders must be at most {N}, got {config.orders}")
    if table.ways != config.ways or config.successors != E:
        raise ValueError(
            f"config must have ways {table.ways} and successors {E}, as table has, got "
            f"{config.ways} and {config.successors}"
        )
    pool = _draft_tree(
        [getattr(table, name) for name in _TABLE],
        [getattr(slots, name) for name in _SLOTS],
        rows, config.ways, list(config.orders), *(getattr(config, name) for name in _CONFIG),
        rows if nodes is None else nodes,
    )  # fmt: skip
    return Pool(*pool)


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    # what fills the pool is the default's: its contexts are as long
    grow, _fill = _jobs(DEEP)
    return [*_jobs(GraphConfig()), *_jobs(SHALLOW), grow]


def _jobs(config: GraphConfig) -> list[Job]:
    N, orders = config.context, config.orders
    block_o = triton.next_power_of_2(len(orders) + 1)
    types = {name: "*i64:16" for name in (
        "key", "group_key", "entry_group", "entry_hash", "succ_source", "nodes", "children",
        "ancestors",
    )}  # fmt: skip
    types |= {name: "i32" for name in ("slots", "groups", "rows", "most", "buckets", "max_depth")}
    types |= {"live": "*u1:16", "temperature": "*fp64:16", "max_cost": "i32"}
    constants = dict(
        N=N, BLOCK_N=N, ORDERS=orders[::-1], BLOCK_O=block_o, HASH=hash_factors(N),
        WAYS=config.ways, E=config.successors, BLOCK_E=config.successors,
        SMOOTHING=float(config.smoothing), TRUST=config.trust, OWN_WEIGHT=config.own_weight,
        BETAS=config.betas, UNCOUPLED=config.uncoupled, LEVEL_COST=config.level_cost,
        FRONTIER=config.frontier, BLOCK_F=config.frontier, STOPS=MAX_STOP_IDS, BLOCK_S=BLOCK_S,
    )  # fmt: skip
    jobs = []
    for kernel, warps in ((_grow_kernel, GROW_WARPS), (_fill_kernel, FILL_WARPS)):
        args = {}
        for param in kernel.params:
            name = param.name.removesuffix("_ptr")
            args[param.name] = constants[name] if param.is_constexpr else types.get(name, "*i32:16")
        if kernel is _fill_kernel:
            args["BLOCK_S"] = FILL_S
        name = kernel.__name__.strip("_").removesuffix("_kernel")
        name = f"draft_tree {name} O={len(orders)}"
        jobs.append(Job(name=name, kernel=kernel, args=args, num_warps=warps))
    return jobs
