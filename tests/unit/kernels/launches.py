"""Prints what a static step launches on a GPU, without one: launches.py SLOTS ROWS DTYPE [FIRST]

The step's kernels are compiled first: by child processes of the step, or, if FIRST is "bench", by
`bench.gpu` for the step's shape. Then Triton's own launch path runs, up to the
binary for sm_90, with a driver that has no device; nothing is launched, and what kernels would have
written is zero. One JSON object per launch. TRITON_CACHE_DIR must name a folder, which may have
binaries: a launch's binary is "kept" if the child processes took it from there or compiled it.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from launched import CONFIG, SHAPE
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gpu.aot import run
from bench.gpu.aot.launches import DTYPES
from bench.gpu.aot.record import TARGETS, jobs_of
from bench.lib.shapes import random_model
from csd.engine.first_call.compile_kernels import compile_in_children
from csd.engine.step.static_step import StaticStep
from csd.graph.consensus import ConsensusGraph
from csd.kernels import ops
from csd.state.context_table import GraphConfig
from csd.state.kv_cache import KVCache
from csd.state.slots import Slots

NO_DEVICE = SimpleNamespace(
    get_current_target=lambda: TARGETS["sm_90"].gpu,
    get_current_device=lambda: "sm_90",
    get_current_stream=lambda device=None: 0,
)
# kernels of other steps: of exact rows, layers with a state, histories, other drafters and graphs
NOT_LAUNCHED = r"exact|linear|tree_conv|state|tail|history|suffix|layered|first_keys|O=4\b"
FILLED = {"empty", "empty_like", "empty_strided", "new_empty"}


class Zeros(TorchDispatchMode):
    """Memory that nothing writes is zero."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket.__name__ in FILLED else found


def binaries() -> int:
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))


def compiled_in_children(step: StaticStep) -> set[str]:
    """Compiles the step's kernels in child processes; returns the hashes of their binaries."""
    compile, (reader, writer) = triton.compile, os.pipe()

    def reported(*args, **options):
        kernel = compile(*args, **options)
        os.write(writer, f"{kernel.hash}\n".encode())
        return kernel

    triton.compile = reported
    if not compile_in_children(step, TARGETS["sm_90"], processes=2):
        raise RuntimeError("not every kernel was compiled")
    triton.compile = compile
    os.close(writer)
    with os.fdopen(reader) as file:
        return {*file.read().split()}


def watch(ahead: set, children: set[str] | None) -> None:
    """ahead: the keys of the jobs that `make aot` compiles. children: hashes of their binaries."""
    launch = JITFunction.run

    def run(kernel, *args, grid, warmup, **options):
        before = binaries()
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        meta, source = compiled.metadata, compiled.src
        row = {
            "kernel": kernel.__name__,
            "triton": triton.__version__,
            "grid": [int(n) for n in grid],
            "binary": compiled.hash,
            "ahead": (source.hash(), meta.num_warps, meta.num_stages, meta.enable_fp_fusion)
            in ahead,
            "signature": {k: str(v) for k, v in source.signature.items()},
            "attrs": str(source.attrs),
            "constants": str(source.constants),
            "shared": meta.shared,
            "scratch": meta.global_scratch_size,
            "kept": binaries() == before and (children is None or compiled.hash in children),
        }
        print(json.dumps(row), flush=True)

    JITFunction.run = run


def main(slots: int, rows: int, name: str, first: str = "children") -> None:
    dtype, children = DTYPES[name], None
    graph = ConsensusGraph(ops.triton(), torch.device("cpu"), GraphConfig(capacity=1 << 12))
    cache = KVCache(
        CONFIG,
        slots=slots,
        pages=slots + 8,
        prompt_pages=2,
        slot_pages=1,
        rows=rows,
        dtype=dtype,
        device="cpu",
    )
    state = Slots.empty(slots, SHAPE.vocab, 64, graph.context)
    decoder = random_model(CONFIG, dtype=dtype)
    # as on a GPU: on a CPU loops may multiply bfloat16
    decoder.linear = torch.nn.functional.linear
    step = StaticStep(decoder, graph, cache, state, ops.triton())
    if first == "bench":
        tasks, folder = [("sm_90", name, SHAPE)], os.environ["TRITON_CACHE_DIR"]
        run(tasks, cache=folder, without=NOT_LAUNCHED, disassembled="$^")
    else:
        children = compiled_in_children(step)
    driver.set_active(NO_DEVICE)
    watch({job.key for job in jobs_of("sm_90", SHAPE, name)}, children)
    with Zeros():
        for _ in range(2):
            step.body(rows, rows)
            print(json.dumps({}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
