"""Draft every live slot's tree from its candidates, by the layered graph of the paper.

Candidate c has the tokens c_1 .. c_L. Equal tokens of one layer are one node, so that a node is a
pair (layer, token) whatever path its candidates took. With n(u, v) the number of candidates that go
from token u in layer d - 1 to v in layer d, n(u) its sum over v and P_c the probability with which
the target drew c_d, an edge weighs

    w(u, v) = alpha mean of P_c over the n(u, v)  +  (1 - alpha) n(u, v) / n(u)

and the root precedes every candidate's first token. As a chain the heaviest edge is followed layer
by layer (ties: smaller token); as a tree a node keeps its MAX_CHILDREN heaviest edges, and the
`frontier` cheapest nodes of a layer are expanded. Tokens that end the sample are not drafted.

Weights are integers, rounded down to multiples of 2^-24: alpha and P_c are multiples of 2^-16, so
nothing is lost before that. An edge costs round(-log2(w) * 2^16), and a path the sum of its edges.
Of all slots' nodes the cheapest fill the pool, as in `csd/kernels/draft/`: the paper's drafts
and the default ones share one budget rule and one pool.

Li et al., "Speculative decoding for multi-sample inference", 2503.05330: consensus extraction.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton

from csd.kernels.common.operator import Fields, RecordOperator, numbers
from csd.kernels.draft.constants import max_path_cost
from csd.kernels.draft.paper.layered_dag.kernel import _layer_kernel
from csd.kernels.draft.paper.layered_dag.reference import layered_dag_ref
from csd.kernels.draft.triton.launch import fill_pool
from csd.state.pool import MAX_CHILDREN, MAX_NODES, Pool, empty_pool
from csd.state.slots import MAX_STOP_IDS, Slots
from csd.state.texts import CHANCE_ONE, Candidates, DagConfig

__all__ = ["layered_dag", "layered_dag_ref", "layered_dag_triton"]

# slots read at once
BLOCK_S = 16
LAYER_WARPS = 8


def layered_dag_triton(
    candidates: Candidates, slots: Slots, rows: int, config: DagConfig, nodes: int | None = None
) -> Pool:
    """Two launches: every slot's nodes, then the pool."""
    S, G, N = slots.count, slots.group_key.shape[0], slots.context.shape[1]
    _, P, L = candidates.token.shape
    device = slots.live.device
    pool = empty_pool(rows, S, G, N, device)
    most = rows if nodes is None else nodes
    block_f = triton.next_power_of_2(config.width)
    lists = torch.empty((S, MAX_NODES), dtype=torch.int64, device=device)
    children = torch.empty((S, block_f * MAX_CHILDREN), dtype=torch.int64, device=device)
    _layer_kernel[(S,)](
        live_ptr=slots.live,
        generated_ptr=slots.generated,
        progress_penalty_ptr=slots.progress_penalty,
        max_new_ptr=slots.max_new,
        stop_ids_ptr=slots.stop_ids,
        token_ptr=candidates.token,
        chance_ptr=candidates.chance,
        nodes_ptr=lists,
        children_ptr=children,
        slots=S,
        rows=rows,
        most=most,
        max_cost=max_path_cost(config.limits),
        P=P,
        BLOCK_P=triton.next_power_of_2(P),
        L=L,
        SHARE=config.share,
        CHANCE=CHANCE_ONE,
        FRONTIER=config.width,
        BLOCK_F=block_f,
        KEPT=config.children,
        STOPS=MAX_STOP_IDS,
        BLOCK_S=BLOCK_S,
        num_warps=LAYER_WARPS,
    )
    fill_pool(lists, slots, pool, most)
    return pool


_SLOTS = (
    "live",
    "group",
    "generated",
    "step",
    "progress_penalty",
    "max_new",
    "temperature",
    "context",
    "stop_ids",
    "prompt_len",
    "group_key",
)


# fields of a DagConfig that extraction reads
_CONFIG = ("alpha", "tree", "frontier", "min_prob")


def _with_config(run: Callable) -> Callable:
    @wraps(run)
    def call(candidates: Candidates, slots: Any, rows: int, *numbers: Any) -> Pool:
        *chosen, nodes = numbers
        config = DagConfig(**dict(zip(_CONFIG, chosen, strict=True)))
        return run(candidates, slots, rows, config, nodes=nodes)

    return call


def _fake(candidates: Any, slots: Any, rows: int, *rest: Any) -> Pool:
    groups, context = slots.group_key.shape[0], slots.context.shape[1]
    return empty_pool(rows, slots.count, groups, context, slots.live.device)


_layered_dag = RecordOperator(
    "layered_dag",
    (
        Fields("candidates", make=Candidates),
        Fields("slots", _SLOTS),
        "SymInt rows",
        *numbers(DagConfig, _CONFIG),
        "SymInt nodes",
    ),
    _with_config(layered_dag_ref),
    _with_config(layered_dag_triton),
    returns=Pool,
    fake=_fake,
)


def layered_dag(
    candidates: Candidates, slots: Slots, rows: int, config: DagConfig, nodes: int | None = None
) -> Pool:
    """Returns the nodes of all live slots' drafts, in a pool of `rows` rows.

    rows: at least the number of live slots. nodes: most drafted nodes over all slots, by default as
    many as fit. config: only alpha, tree, frontier and min_prob are used.
    """
    _layered_dag.check({"S": slots.count}, slots.live.device, candidates, slots)
    _, P, L = candidates.token.shape
    if P > 256 or L > 16:
        raise ValueError(f"candidates must be at most 256 of 16 tokens, got {P} of {L}")
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if nodes is not None and nodes < 0:
        raise ValueError(f"nodes must be at least 0, got {nodes}")
    most = rows if nodes is None else nodes
    chosen = (getattr(config, name) for name in _CONFIG)
    return _layered_dag(candidates, slots, rows, *chosen, most)
