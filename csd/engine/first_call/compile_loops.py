"""Compilation of the loops of a step (numba), by running each of its operations once.

About half of the loops that a machine's first call compiles belong to the layers; the others
verify, draft and insert, and are compiled by a second process meanwhile (`compile_in_parallel`).
numba caches compiled loops in files, which both processes read. This process compiles the loops
that the second one has left out, or all loops if it fails.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from csd.kernels.backends import loops
from csd.kernels.common.cpu import compiles
from csd.kernels.ops import Ops
from csd.kernels.states import commit_states
from csd.state.context_table import GraphConfig, Table
from csd.state.pool import Pool
from csd.state.recurrent import CHUNK, TAIL, StateMemory
from csd.state.slots import Slots
from csd.utils import isolated_python


def compile_verify(ops: Ops, slots: Slots, logits: torch.Tensor, pool: Pool) -> None:
    """Compile verification, one loop for all filters. Leaves `slots.max_new` at 0."""
    slots.max_new.fill_(1)
    ops.verify(logits, pool, slots)
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
            *node,
            *pages,
            table_of_pages,
            slots.generated,
            verdict.accept_row,
            verdict.accept_count,
            True,
        )
        ops.insert_observed(table, pool, slots, verdict, config)
    # the inserts for a prompt, and for steps without drafts
    rows = ops.observe(pool, slots, verdict, config)
    ops.graph_insert(table, *rows, slots.group_key, config.orders)


LOG = logging.getLogger("csd")


@contextmanager
def compile_in_parallel(dtype: torch.dtype, vocab: int, rows: int) -> Iterator[None]:
    """Context that starts a helper process at the body's first compilation, and waits for it.

    dtype, vocab: of a step's logits. rows: number of rows to compile with. With one thread no
    process is started.
    """
    if not _can_start():
        yield
        return
    from csd.kernels.cpu_ops import before_compiling

    helpers: list[subprocess.Popen] = []

    def start() -> None:
        name = str(dtype).removeprefix("torch.")
        job = dict(dtype=name, vocab=vocab, rows=rows, threads=torch.get_num_threads())
        try:
            helpers.append(
                subprocess.Popen(
                    isolated_python.command(__name__, [json.dumps(job)]),
                    env=isolated_python.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        except OSError as error:
            LOG.warning("loops are compiled in one process only: %s", error)

    try:
        with before_compiling(start):
            yield
        for helper in helpers:
            if helper.wait():
                LOG.warning("the process that compiles kernels has failed")
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


def _can_start() -> bool:
    # a program that embeds Python may have no Python executable
    if not compiles() or not sys.executable:
        return False
    from csd.kernels.cpu_ops import threads

    return threads() > 1


def compile_step_loops(dtype: torch.dtype, vocab: int, rows: int) -> None:
    """Compile the loops of a step, except for those of its layers."""
    ops, logprobs = loops(), torch.promote_types(dtype, torch.float32)
    slots = Slots.empty(rows, vocab, 1, 1, logprobs)
    slots.group.zero_()
    slots.context[:, 0] = 0
    slots.live.fill_(True)
    logits = torch.zeros(rows, vocab, dtype=dtype)
    compile_verify(ops, slots, logits, ops.roots(slots, rows))
    compile_drafting(ops, dtype, logprobs)


def main(arguments: list[str]) -> None:
    """Compile the job in `arguments[0]`, JSON of `compile_step_loops`' arguments and threads."""
    job = json.loads(arguments[0])
    torch.set_num_threads(job["threads"])
    compile_step_loops(getattr(torch, job["dtype"]), job["vocab"], job["rows"])
