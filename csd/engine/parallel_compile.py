"""Parallel compilation: a second process compiles loops while this one compiles the layers' ones.

About half of the loops that a machine's first call compiles belong to the layers; the others
verify, draft and insert. numba caches compiled loops in files, which both processes read. This
process compiles the loops that the second one has left out, or all loops if it fails.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from csd.engine import isolated_python
from csd.engine.loop_compile import compile_drafting, compile_verify
from csd.kernels.backends import loops
from csd.kernels.common.cpu import compiles
from csd.state.slots import Slots

LOG = logging.getLogger("csd")


@contextmanager
def compile_in_parallel(dtype: torch.dtype, vocab: int, rows: list[int]) -> Iterator[None]:
    """Context that starts a helper process at the body's first compilation, and waits for it.

    dtype, vocab: of a step's logits. rows: numbers of rows to compile for. With one thread no
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
            helpers.append(subprocess.Popen(
                isolated_python.command(__name__, [json.dumps(job)]),
                env=isolated_python.environment(),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ))  # fmt: skip
        except OSError as error:
            LOG.warning("loops are compiled in one process only: %s", error)

    try:
        with before_compiling(start):
            yield
        for helper in helpers:
            if helper.wait():
                LOG.warning("the process that compiles loops has failed")
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


def compile_step_loops(dtype: torch.dtype, vocab: int, rows: list[int]) -> None:
    """Compile the loops of a step, except for those of its layers."""
    ops, logprobs = loops(), torch.promote_types(dtype, torch.float32)
    slots = Slots.empty(rows[-1], vocab, 1, 1, logprobs)
    slots.group.zero_()
    slots.context[:, 0] = 0
    for count in rows:
        slots.live.copy_(torch.arange(slots.count) < count)
        logits = torch.zeros(count, vocab, dtype=dtype)
        compile_verify(ops, slots, logits, ops.roots(slots, count))
    compile_drafting(ops, dtype, logprobs)


def main(arguments: list[str]) -> None:
    """Compile the job in `arguments[0]`, JSON of `compile_step_loops`' arguments and threads."""
    job = json.loads(arguments[0])
    torch.set_num_threads(job["threads"])
    compile_step_loops(getattr(torch, job["dtype"]), job["vocab"], job["rows"])
