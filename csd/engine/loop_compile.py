"""Compilation of the loops of a step (numba), by running each of its operations once."""

import torch

from csd.kernels.ops import Ops
from csd.kernels.states import commit_states
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.recurrent import CHUNK, TAIL, StateMemory
from csd.state.slots import Slots


def compile_verify(ops: Ops, slots: Slots, logits: torch.Tensor, pool: Pool) -> None:
    """Compile verification: by nucleus, and by passes over the vocabulary.

    Passes handle rows with filters, with very many likely tokens, or that draw an unlikely token.
    A slot's penalty makes its rows float32. Leaves `slots.max_new` at 0.
    """
    slots.max_new.fill_(1)
    ops.verify(logits, pool, slots)
    for x in (logits, logits.to(slots.logprobs.dtype)):
        ops.verify_all(x, pool, slots)
    slots.max_new.zero_()


def compile_states(ops: Ops, memory: StateMemory) -> None:
    """Compile the commit of states: commit a token that advances slot 0's states by one chunk.

    Resets `memory.base` to 0.
    """
    slots = memory.base.shape[0]
    count = torch.zeros(slots, dtype=torch.int32)
    count[0] = 1
    row = torch.zeros(slots, 1, dtype=torch.int32)
    commit_states(ops, memory, (TAIL + 1) * count, row, count)
    assert int(memory.base[0]) == CHUNK
    memory.base.zero_()


def compile_drafting(ops: Ops, dtype: torch.dtype, logprobs: torch.dtype) -> None:
    """Compile drafting, commit and insertion, on a temporary graph and slots.

    Otherwise a call would compile them, and its automatic budget would count that as drafting time.

    dtype: dtype of logits. logprobs: dtype of the slots' log-probabilities.
    """
    config = GraphConfig(capacity=16)
    table, slots = Table.empty(config), Slots.empty(1, 32, 4, config.context, logprobs)
    slots.live[0], slots.group[0], slots.group_key[0], slots.max_new[0] = True, 0, 1, 4
    slots.context[0] = 1
    # two rows of one slot, one of which is pruned
    pool = ops.roots(slots, 2)
    ops.prune(pool, 1, ops.node_costs(pool, slots)[0])
    for _ in range(2):
        pool = ops.draft_tree(table, slots, 2, config)
        logits = torch.zeros(pool.rows, 32, dtype=dtype)
        verdict, *_ = ops.decide(logits, pool, slots, False, False)
        node, pages = torch.zeros(2, 1, pool.rows, 1, 8), torch.zeros(2, 1, 1, 64, 1, 8)
        table_of_pages = torch.zeros(1, 1, dtype=torch.int32)
        ops.commit_kv(
            *node, *pages, table_of_pages, slots.generated, verdict.accept_row,
            verdict.accept_count, True,
        )  # fmt: skip
        ops.insert_observed(table, pool, slots, verdict, config)
    # the inserts for a prompt, and for steps without drafts
    rows = ops.observe(pool, slots, verdict, config)
    ops.graph_insert(table, *rows, slots.group_key, config.orders)
