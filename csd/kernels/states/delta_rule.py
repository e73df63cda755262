"""The gated delta rule and Mamba-2's state space model along the paths of a pool's trees.

A head's state S is a matrix of keys and values. Token t has a query q_t, a key k_t of length one, a
value v_t, a decay d_t in (0, 1] and a strength b_t. `tree_delta_rule` computes

    S_t = d_t S_{t-1} + k_t u_t^T,    u_t = b_t (v_t - d_t S_{t-1}^T k_t),    o_t = S_t^T q_t

(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), and `tree_ssm`

    S_t = d_t S_{t-1} + B_t u_t^T,    u_t = dt_t x_t,    d_t = exp(dt_t A),    o_t = S_t^T C_t

(Dao and Gu, "Transformers are SSMs", 2024; the output is o_t + D x_t), which is the same with key
B_t and query C_t, and with given updates, so there is nothing to solve.

No node needs a state of its own. With S the slot's state at the checkpoint of row j
(`csd/state/recurrent.py`) and the tokens i after it in order, those of the slot's tail and then the
nodes above j,

    a <- S^T k_j,    a <- d_i a + (k_i . k_j) u_i for all i < j,    u_j = b_j (v_j - d_j a)
    o <- S^T q_j,    o <- d_i o + (k_i . q_j) u_i for all i <= j

which is the recurrence applied to one vector: decays are multiplied in the same order, and no two
logarithms are subtracted. The updates u_i of a tail are stored, so that its tokens need no second
product with a state. A row's sums run over its own text in order of position, from a state that
is a function of that text: its bits depend on nothing else.

A row's checkpoint may be one chunk after the slot's stored one (`base`); the state is then advanced
by `add_chunk`, as in `csd.kernels.advance_state`. The references have fixed shapes and read nothing
on the host; the kernel is in `triton/delta_rule.py`.
"""

from collections.abc import Callable

import torch

from csd.kernels.common.operator import launcher, operator
from csd.kernels.states.advance import check_states, next_state
from csd.kernels.states.paths import DEPTHS
from csd.state.record import check_tensor
from csd.state.recurrent import TAIL, checkpoint

__all__ = [
    "tree_delta_rule",
    "tree_delta_rule_ref",
    "tree_delta_rule_triton",
    "tree_ssm",
    "tree_ssm_ref",
    "tree_ssm_triton",
]


@launcher
def tree_delta_rule_triton() -> Callable:
    from csd.kernels.states.triton.delta_rule import tree_delta_rule_triton

    return tree_delta_rule_triton


@launcher
def tree_ssm_triton() -> Callable:
    from csd.kernels.states.triton.delta_rule import tree_ssm_triton

    return tree_ssm_triton


def tree_delta_rule_ref(
    q: torch.Tensor,
    value: torch.Tensor,
    strength: torch.Tensor,
    node_key: torch.Tensor,
    node_decay: torch.Tensor,
    node_update: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
) -> torch.Tensor:
    """Returns outputs [M, H, Dv] and writes node_update; shapes as of `tree_delta_rule`."""
    states = state, key, update, decay, base, slot, position, path
    k, q = (_each_head(x, node_decay.shape[1]) for x in (node_key, q))
    live, depth = slot >= 0, _depth(path)
    read = _read_after_tails(torch.stack((k, q)), *states)
    u = torch.zeros_like(value)
    for d in range(path.shape[1]):
        rows_of_depth = (depth == d) & live
        update_of_depth = strength[..., None] * (value - node_decay[..., None] * read[0])
        u = torch.where(rows_of_depth[:, None, None], update_of_depth, u)
        read = _read_after_node(read, torch.stack((k, q)), k, u, node_decay, path[:, d])
    node_update.copy_(u)
    return torch.where(live[:, None, None], read[1], 0)


def tree_ssm_ref(
    q: torch.Tensor,
    node_key: torch.Tensor,
    node_decay: torch.Tensor,
    node_update: torch.Tensor,
    state: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
) -> torch.Tensor:
    """Returns outputs [M, H, Dv]; shapes as of `tree_ssm`."""
    states = state, key, update, decay, base, slot, position, path
    k, q = (_each_head(x, node_decay.shape[1]) for x in (node_key, q))
    read = _read_after_tails(q[None], *states)
    for d in range(path.shape[1]):
        read = _read_after_node(read, q[None], k, node_update, node_decay, path[:, d])
    return torch.where((slot >= 0)[:, None, None], read[0], 0)


def _each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _depth(path: torch.Tensor) -> torch.Tensor:
    return (path >= 0).sum(1) - 1


def _read_after_tails(
    x: torch.Tensor,  # [2, M, H, Dk] or [1, ..]
    *states: torch.Tensor,  # state, key, update, decay, base, slot, position and path
) -> torch.Tensor:
    """[.., M, H, Dv]: x times the state after the committed tokens of each row's slot."""
    state, key, update, decay, base, slot, position, path = states
    s, H = slot.clamp(min=0).long(), state.shape[1]
    first = torch.maximum(checkpoint(position), base[s])
    later = next_state(state[None], key[None], update[None], decay[None], base)[0]
    chosen = torch.where((first > base[s])[:, None, None, None], later[s], state[s])
    read = (chosen * x[..., None]).sum(-2)
    committed = position - _depth(path)
    for i in range(TAIL):
        index = ((first + i) % TAIL).long()
        k = _each_head(key[s, index], H)
        added = (k * x).sum(-1, keepdim=True) * update[s, index]
        moved = decay[s, index][..., None] * read + added
        # entries after a tail may hold any value: select, since 0 * NaN is not 0
        read = torch.where((first + i < committed)[:, None, None], moved, read)
    return read


def _read_after_node(
    read: torch.Tensor,
    x: torch.Tensor,
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """`read` after the node `row` [M] of each row's path, or unchanged where it is -1."""
    r = row.clamp(min=0).long()
    added = (key[r] * x).sum(-1, keepdim=True) * update[r]
    moved = decay[r][..., None] * read + added
    return torch.where((row >= 0)[:, None, None], moved, read)


def tree_delta_rule(
    q: torch.Tensor,  # [M, Hk, Dk], scaled
    value: torch.Tensor,  # [M, H, Dv]
    strength: torch.Tensor,  # [M, H]
    node_key: torch.Tensor,  # [M, Hk, Dk], of length one
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv], written
    state: torch.Tensor,  # [S, H, Dk, Dv], at `base`
    key: torch.Tensor,  # [S, 32, Hk, Dk], of the tokens after `base`, by position % 32
    update: torch.Tensor,  # [S, 32, H, Dv]
    decay: torch.Tensor,  # [S, 32, H]
    base: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32, -1 in padding
    position: torch.Tensor,  # [M] int32
    path: torch.Tensor,  # [M, 17] int32, of `csd.kernels.tree_paths`
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
) -> torch.Tensor:
    """Returns outputs [M, H, Dv] and writes the updates to node_update; both are 0 in padding.

    All of one dtype, float32 or float64. Head h has the query and key of head h // (H / Hk).
    """
    nodes, stored = (node_key, node_decay, node_update), (state, key, update, decay)
    rest = *nodes, *stored, base, slot, position, path, slot_start, slot_nodes
    check_nodes(q, *rest)
    for name, x, shape in (
        ("value", value, node_update.shape),
        ("strength", strength, node_decay.shape),
    ):
        check_tensor(name, x, shape, state.dtype, state.device)
    return _tree_delta_rule(q, value, strength, *rest)


def tree_ssm(
    q: torch.Tensor,  # [M, Hk, Dk], C
    node_key: torch.Tensor,  # [M, Hk, Dk], B
    node_decay: torch.Tensor,  # [M, H]
    node_update: torch.Tensor,  # [M, H, Dv], dt x
    state: torch.Tensor,  # this and those below as of `tree_delta_rule`
    key: torch.Tensor,
    update: torch.Tensor,
    decay: torch.Tensor,
    base: torch.Tensor,
    slot: torch.Tensor,
    position: torch.Tensor,
    path: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
) -> torch.Tensor:
    """Returns outputs [M, H, Dv], zeros in padding. All of one dtype, float32 or float64."""
    nodes, stored = (node_key, node_decay, node_update), (state, key, update, decay)
    rest = *nodes, *stored, base, slot, position, path, slot_start, slot_nodes
    check_nodes(q, *rest)
    return _tree_ssm(q, *rest)


def check_nodes(q: torch.Tensor, *nodes_and_states: torch.Tensor) -> None:
    """Raises ValueError, naming the tensor, unless states and operands of `tree_ssm` fit."""
    nodes, stored, where = nodes_and_states[:3], nodes_and_states[3:7], nodes_and_states[7:]
    state, key, _, _ = stored
    check_states(*stored)
    (S, H, Dk, Dv), M = state.shape, where[1].shape[0]
    keys = M, key.shape[2], Dk
    names, shapes = ("q", "node_key", "node_decay", "node_update"), (keys, keys, (M, H), (M, H, Dv))
    for name, x, shape in zip(names, (q, *nodes), shapes, strict=True):
        check_tensor(name, x, shape, state.dtype, state.device)
    names_where = "base", "slot", "position", "path", "slot_start", "slot_nodes"
    sizes = (S,), (M,), (M,), (M, DEPTHS), (S,), (S,)
    for name, x, size in zip(names_where, where, sizes, strict=True):
        check_tensor(name, x, size, torch.int32, state.device)


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu.advance import reads_states
    from csd.kernels.states.cpu.delta_rule import tree_delta_rule

    return (lambda *args: reads_states(*args[:10])), tree_delta_rule


def _ssm_loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.states.cpu.advance import reads_states
    from csd.kernels.states.cpu.delta_rule import tree_ssm

    return (lambda *args: reads_states(*args[:8])), tree_ssm


_tree_delta_rule = operator(
    "tree_delta_rule",
    tree_delta_rule_ref,
    tree_delta_rule_triton,
    loop=_loop,
    written=("node_update",),
    schema=tree_delta_rule,
    fake=lambda q, value, *others: torch.empty_like(value),
)
_tree_ssm = operator(
    "tree_ssm",
    tree_ssm_ref,
    tree_ssm_triton,
    loop=_ssm_loop,
    schema=tree_ssm,
    fake=lambda q, node_key, node_decay, node_update, *others: torch.empty_like(node_update),
)
