"""Compiles loops in a second process, while this one compiles those of the layers.

A machine's first call waits for both: about half of what it compiles is of the layers, and the rest
verifies, drafts and inserts. numba keeps what a process compiles in files, where the other one
finds it. What the second process leaves out, or all of it where it fails, is compiled here.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from csd.backends import loops
from csd.cpu import compiles
from csd.engine import own_python
from csd.engine.compile_step import compile_rest, compile_verify
from csd.state.slots import Slots

LOG = logging.getLogger("csd")


@contextmanager
def compiled_beside(dtype: torch.dtype, vocab: int, rows: list[int]) -> Iterator[None]:
    """Where the body compiles the first of csd's loops, begins a process that compiles the others.

    dtype, vocab: of a step's logits; rows: numbers of them. Ends once that process has ended. A
    process of one thread compiles by itself.
    """
    if not _may_begin():
        yield
        return
    from csd.cpu.entry import before_compiling

    others: list[subprocess.Popen] = []

    def begin() -> None:
        name = str(dtype).removeprefix("torch.")
        job = dict(dtype=name, vocab=vocab, rows=rows, threads=torch.get_num_threads())
        try:
            others.append(subprocess.Popen(
                own_python.command(__name__, [json.dumps(job)]), env=own_python.environment(),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ))  # fmt: skip
        except OSError as error:
            LOG.warning("no second process compiles loops: %s", error)

    try:
        with before_compiling(begin):
            yield
        for other in others:
            if other.wait():
                LOG.warning("the process that compiles loops has failed")
    finally:
        for other in others:
            other.kill()
            other.wait()


def _may_begin() -> bool:
    # a program that embeds Python may have no executable of it
    if not compiles() or not sys.executable:
        return False
    from csd.cpu.entry import threads

    return threads() > 1


def compile_others(dtype: torch.dtype, vocab: int, rows: list[int]) -> None:
    """Compiles what steps run beside the layers."""
    ops, logprobs = loops(), torch.promote_types(dtype, torch.float32)
    slots = Slots.empty(rows[-1], vocab, 1, 1, logprobs)
    slots.group.zero_()
    slots.context[:, 0] = 0
    for count in rows:
        slots.live.copy_(torch.arange(slots.count) < count)
        logits = torch.zeros(count, vocab, dtype=dtype)
        compile_verify(ops, slots, logits, ops.roots(slots, count))
    compile_rest(ops, dtype, logprobs)


def main(arguments: list[str]) -> None:
    """Compiles what the one argument, a job in JSON, names."""
    given = json.loads(arguments[0])
    torch.set_num_threads(given["threads"])
    compile_others(getattr(torch, given["dtype"]), given["vocab"], given["rows"])

