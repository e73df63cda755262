"""Draft every live slot's tree from the consensus graph: one pool of the likeliest nodes.

A node's contexts of all orders are looked up in its group, then those of the prior's orders in the
group's part of the prior's table if there is one, and last the context of the group as a whole
(order 0). With W_n the total of its context of order n, w_n(t) the weight of successor t, c the
smoothing weight and L the largest trust in a context, both with values of their own for the prior,
and the longest context first in each table:

    lam_n = L * W_n / (W_n + c)                     0 where the context is absent
    share_n = lam_n * product of (1 - lam_m) over the contexts m before it
    p(t) = sum over n of share_n * p_n(t)

and the node keeps its MAX_CHILDREN likeliest tokens, ties to smaller tokens. p_n(t) = w_n(t) / W_n
where the slot is greedy. Where it samples, a context's successors are scored with the same noise g
that verification will use, more sharply in longer contexts (beta_n):

    c_n(t) = exp(beta_n (log v_n(t) + g_t)) / (sum over s of the same
                                             + exp(beta_n (log max(r_n, 1/1000) + 0.577)))
    p_n(t) = (1 - u) c_n(t) + u v_n(t)

with r_n = 1 - sum of w_n(s) / W_n, v_n(t) the weights as shares of W_n, in which successors that
the sample itself has had after this context are multiplied by `own_weight` while their sum stays
the same, and u the `uncoupled` share. A mixture of coupled contexts predicts better than coupling
their mixture: a context either matches the sample's text, and then its distribution is nearly
right, or it does not. The same holds inside a context: its weights are a sum of distributions, of
which the sample's may be a sharp one that noise would not change; u accounts for those.

Every term of p is rounded down to a multiple of 2^-24, so that sums are exact. An edge costs
round(-log2(p) * 2^16) plus the cost of a level, and a path the sum of its edges, so a child never
costs less than its parent. Neither tokens that end the sample nor paths less likely than 2^-60 are
drafted.

A level costs D = round(-log2(decay) * 2^16) where a sample commits u = 5/2 tokens per step. A
sample that copies commits more, and its paths may be longer. With T tokens generated in n steps,
and `settle` = s steps at the usual rate before them,

    level = D * u (n + s) / (T + u s)    rounded down, from D / 4 to 3 D / 2; D where s = 0

so a tree is deeper the more tokens per step the sample has committed so far.

Level by level, a slot's `frontier` cheapest nodes are expanded (ties: token, then the parent's
rank). Of all nodes, at most MAX_NODES - 1 per slot, the cheapest fill the rows of the pool that the
roots leave free. `csd.state.pool_builder.progress_penalties` are added to their costs, so that
samples that are behind get more rows when the call waits only for them. At temperature 0, a sample
that is ahead of the others drafts from text at other places, which is accepted less often than its
weight suggests; one that is behind has its siblings' text at the same place. So while all live
slots belong to one group,

    min(group_penalty * (generated - the fewest of a live slot with as many steps),
        MAX_GROUP_PENALTY)

is added instead if it is larger. Only slots with as many steps are compared, since a sample that
began later may have complete earlier ones to draft from. Ties go by slot, depth, token and the
parent's rank. Probabilities and noise are float64 before an edge is rounded, so that
implementations whose logarithms differ in the last bit get the same integers except for one edge
in 10^9.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from csd.kernels.common.operator import RecordOperator, launcher, numbers
from csd.kernels.draft.constants import MAX_PRIOR_SUCCESSORS, SLOTS, TABLE, DraftNoise
from csd.kernels.draft.reference import draft_tree_ref
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.pool_builder import allocate_pool
from csd.state.record import on_host
from csd.state.slots import Slots

__all__ = ["DraftNoise", "draft_tree", "draft_tree_ref", "draft_tree_triton"]

# fields of a GraphConfig that drafting reads, besides its sizes
_CONFIG = (
    "smoothing",
    "trust",
    "own_weight",
    "beta",
    "beta_order",
    "uncoupled",
    "decay",
    "settle",
    "group_penalty",
    "frontier",
    "max_depth",
    "min_prob",
    "prior_smoothing",
    "prior_trust",
)


@launcher
def draft_tree_triton() -> Callable:
    from csd.kernels.draft.triton.launch import draft_tree_triton

    return draft_tree_triton


def with_config(run: Callable) -> Callable:
    @wraps(run)
    def call(
        table: Any, slots: Any, prior: list, rows: int, ways: int, prior_ways: int, *numbers: Any
    ) -> Pool:
        prior_parts, orders, prior_orders, *drafting, nodes = numbers
        of_prior = replace(Table(prior_ways, *prior), parts=prior_parts) if prior else None
        graph = Table(ways, **TABLE(table)._asdict(), prior=of_prior)
        config = GraphConfig(
            orders=tuple(orders),
            prior_orders=tuple(prior_orders),
            ways=ways,
            capacity=graph.entry_group.shape[0],
            successors=graph.succ_token.shape[1],
            **dict(zip(_CONFIG, drafting, strict=True)),
        )
        return run(graph, slots, rows, config, nodes=nodes)

    return call


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.draft.cpu.draft_tree import draft_tree

    return (lambda table, slots, *others: on_host(slots.live)), with_config(draft_tree)


_draft_tree = RecordOperator(
    "draft_tree",
    (
        TABLE,
        SLOTS,
        "Tensor[] prior",
        "SymInt rows",
        "SymInt ways",
        "SymInt prior_ways",
        "SymInt prior_parts",
        "SymInt[] orders",
        "SymInt[] prior_orders",
        *numbers(GraphConfig, _CONFIG),
        "SymInt nodes",
    ),
    with_config(draft_tree_ref),
    with_config(draft_tree_triton),
    loop=_loop,
    returns=Pool,
    fake=lambda table, slots, prior, rows, *rest: allocate_pool(slots, rows),
)


def draft_tree(
    table: Table, slots: Slots, rows: int, config: GraphConfig, nodes: int | None = None
) -> Pool:
    """Returns the likeliest nodes of all live slots' trees, in a pool of `rows` rows.

    table: of the groups; `table.prior`, if any, is of all groups, each of which reads the part
    `slots.prior_part` of it. rows: at least the number of live slots. nodes: most drafted nodes
    over all slots, by default as many as fit.
    """
    device, sizes = slots.live.device, {"S": slots.count}
    _draft_tree.check(sizes, device, table, slots)
    N, E = sizes["N"], sizes["E"]
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}")
    if nodes is not None and nodes < 0:
        raise ValueError(f"nodes must be at least 0, got {nodes}")
    if config.context > N:
        raise ValueError(f"config.orders must be at most {N}, got {config.orders}")
    prior = [] if table.prior is None else check_prior(table.prior, config, N, device)
    if table.ways != config.ways or config.successors != E:
        raise ValueError(
            f"config must have ways {table.ways} and successors {E}, as table has, got "
            f"{config.ways} and {config.successors}"
        )
    values = (getattr(config, name) for name in _CONFIG)
    max_drafted = rows if nodes is None else nodes
    ways = config.ways, *((1, 1) if table.prior is None else (table.prior.ways, table.prior.parts))
    orders = list(config.orders), list(config.prior_orders)
    return _draft_tree(table, slots, prior, rows, *ways, *orders, *values, max_drafted)


def check_prior(
    prior: Table, config: GraphConfig, context: int, device: torch.device
) -> list[torch.Tensor]:
    """Returns the tensors of a prior's table.

    Raises ValueError for another table than contexts of `config.prior_orders`, for slots that keep
    `context` tokens.
    """
    sizes: dict[str, int] = {}
    TABLE.check(prior, sizes, device)
    longest = min(context, sizes["N"])
    if max(config.prior_orders) > longest:
        raise ValueError(
            f"config.prior_orders must be at most {longest}, got {config.prior_orders}"
        )
    if sizes["E"] > MAX_PRIOR_SUCCESSORS:
        raise ValueError(
            f"table.prior must have at most {MAX_PRIOR_SUCCESSORS} successors, got {sizes['E']}"
        )
    return [*TABLE(prior)]
