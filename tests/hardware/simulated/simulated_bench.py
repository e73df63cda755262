"""`bench.gpu` on a simulated GPU under a simulated clock: tiny shapes, and boxes as they are."""

import argparse
import json
import subprocess
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from interpreter import ordered_dot
from simulated_gpu import Gpu
from simulated_gpu.clock import Clock, Killed
from triton.runtime.interpreter import InterpreterBuilder

from bench.gpu import __main__ as gpu
from bench.gpu.lib import exact_products, phases, workload
from bench.gpu.sections import (
    attention,
    continuous,
    doctor,
    drafters,
    end_to_end,
    equality,
    first_call,
    parity,
    prefill,
    products,
)
from bench.gpu.sections import compile as compile_ahead
from bench.lib.shapes import SHAPES
from csd.engine.step import static_step
from csd.graph import consensus
from csd.models import exact_products as row_blocks
from csd.state.context_table import GraphConfig

TINY = replace(SHAPES["tiny"], context=2048)
# of a process that imports torch and makes a context
BEGIN = 8.0
# checks
AT_ONCE = 2


def small(trace):
    """Six tokens a sample, out of the tiny vocabulary."""

    def ids(tokens):
        return [t % TINY.vocab for t in tokens]

    samples = [ids(s[:6]) for s in trace.samples]
    return replace(trace, prompt=ids(trace.prompt), samples=samples, top=None, stop_ids=())


@contextmanager
def tiny_shapes():
    """Both large shapes are the tiny one; the graph is small, for the references copy it."""
    whole = workload.recorded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_step, "SIZES", (16, 32))
        patch.setattr(consensus, "GraphConfig", partial(GraphConfig, capacity=1 << 10))
        patch.setitem(SHAPES, "llama-3.1-8b", TINY)
        qwen = replace(TINY, family="qwen2", qkv_bias=True, qk_norm=False)
        patch.setitem(SHAPES, "qwen2.5-7b", qwen)
        for module in (end_to_end, drafters, equality):
            patch.setattr(module, "recorded", lambda section: [small(t) for t in whole(section)])
        for module in (end_to_end, equality, exact_products, prefill, first_call, products):
            patch.setattr(module, "shapes", lambda section: {"tiny": TINY})
        patch.setattr(parity, "SAMPLES", 2)
        patch.setattr(parity, "NEW", 3)
        patch.setattr(parity, "LONG_NEW", 3)
        patch.setattr(parity, "WIDE", 2000)
        # a simulated GPU is one thread's
        patch.setattr(parity, "other_thread", lambda device: nullcontext())
        patch.setattr(end_to_end, "SAMPLES", (4, 1))
        patch.setattr(end_to_end, "PAIRS", 2)
        rates = dict(bandwidth=1e9, flops=1e9)
        for module in (end_to_end, prefill):
            patch.setattr(module, "measure", lambda device: rates)
        patch.setattr(prefill, "JOBS", ((3, 5),))
        for name, value in dict(SAMPLES=(2,), PROMPT=5, NEW=3).items():
            patch.setattr(first_call, name, value)
        patch.setattr(products, "ROWS", (1, 16, 32))
        patch.setattr(workload, "copies_for", lambda size: 1)
        patch.setattr(products, "replayed", lambda calls, count: [sum(map(called, calls))])
        patch.setattr(products, "copy_bandwidth", lambda device: 1e9)
        # of exact rows
        patch.setattr(InterpreterBuilder, "create_dot", ordered_dot)
        patch.setattr(row_blocks, "GPU_SIZES", (1, 16, 17, 33))
        patch.setattr(exact_products, "SIZES", (16,))
        patch.setattr(exact_products, "replayed", lambda calls, _: [sum(map(called, calls))])
        patch.setattr(exact_products, "copy_bandwidth", lambda device: 1e9)
        patch.setattr(equality, "SAMPLES", 2)
        patch.setattr(equality, "NEW", 3)
        # a model of transformers does not run here
        patch.setattr(continuous, "build", lambda section: None)
        yield patch


def called(call) -> float:
    call()
    return 1.0


class Run:
    """`main` of the benchmark with its sections in this process, side by side on a clock.

    charged: by section, seconds by what they were for. ahead: of compiling beforehand.
    """

    def __init__(self, out, clock: Clock, *options: str, ahead: float = 40.0):
        self.clock, self.charged, self._ahead = clock, {}, ahead
        with tiny_shapes() as patch, Gpu(clock=clock, by_rows=True) as self.gpu:
            patch.setattr(gpu, "run_apart", self._run_apart)
            patch.setattr(doctor, "examined", self._examined)
            patch.setattr(compile_ahead, "compile_all", self._compile_all)
            self.commands: list[list[str]] = []
            for module in (parity, attention):
                stand_in = SimpleNamespace(
                    run=self._process, TimeoutExpired=subprocess.TimeoutExpired
                )
                patch.setattr(module, "subprocess", stand_in)
            for module in (phases, first_call):
                patch.setattr(module, "device_seconds", self._device_seconds)
            self.code = gpu.main(["--out", str(out), *options])
        summary = json.loads((out / "summary.json").read_text())
        self.status, self.seconds = summary["sections"], summary["seconds"]
        self.found = {name: json.loads((out / f"{name}.json").read_text()) for name in self.status}

    def _run_apart(self, args: argparse.Namespace, names: list[str], seconds: float) -> None:
        clock, ends = self.clock, []
        begun = clock.now
        for name in names:
            clock.now, clock.deadline = begun, begun + seconds
            clock.charged.clear()
            try:
                clock.charge("begin", BEGIN)
                gpu.run_here(args, name, seconds - BEGIN - gpu.GRACE)
            except Killed:
                clock.now = clock.deadline
            self.charged[name] = dict(clock.charged)
            ends.append(clock.now)
        clock.now, clock.deadline = max(ends), float("inf")

    def _examined(self, section, job) -> dict:
        self.clock.charge("checks", self.clock.check / AT_ONCE)
        return {"checks": [dict(name="verify", calls=1, error=None)]}

    def _compile_all(self, tasks, processes, cache, timeout) -> list[dict]:
        self.tasks = tasks
        self.clock.charge("ahead", min(self._ahead, timeout))
        return [
            dict(kernel="verify", target=target, dtype=dtype, shared=1, limit=2, spills=0, stack=0)
            for target, dtype, _ in tasks
        ]

    def _process(self, command, **options) -> SimpleNamespace:
        self.commands.append(command)
        self.clock.charge("processes", BEGIN)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    def _device_seconds(self, run) -> dict[str, float]:
        """A second a step, and as much as three for the prompt."""
        before = self.gpu.replays
        run()
        return {"attention": self.gpu.replays - before + 3.0, "other": 3.0}
