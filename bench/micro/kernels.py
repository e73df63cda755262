"""Every kernel on a GPU: correctness, then microseconds, bytes and share of copy bandwidth.

    python -m bench kernels [--full | --quick] [--only attention] [--beside flashinfer] [--json F]

Attention runs at twelve shapes and is compared to PyTorch's own operations
(`attention_rivals.py`). --quick compiles none of theirs: one model's six shapes, beside SDPA with
an eager merge, which has more launches than a compiled one. --full adds every combination of at
most 1,024 rows, and FlashInfer, xFormers and SuffixGPU if they are installed. Calls are replayed
from CUDA graphs over distinct buffers that together exceed the cache.
"""

import argparse
import sys
import traceback
from dataclasses import replace

import torch

from bench.lib import common
from bench.lib.kernel_shape import SHAPES
from bench.micro.jobs.attention_job import Job, error_of, limit_for, make, shapes
from bench.micro.jobs.attention_others import OTHERS
from bench.micro.jobs.attention_rivals import FULL_RIVALS, QUICK_RIVALS, RIVALS
from bench.micro.jobs.step_jobs import makers
from bench.micro.jobs.step_state import Sizes
from bench.micro.jobs.suffix_gpu import suffix_gpu_job
from bench.micro.timing import copies_for, copy_bandwidth, replayed
from csd.kernels.attention import tree_attention_ref, tree_attention_triton
from csd.kernels.attention.layout import with_layout
from csd.kernels.attention.triton.launch import empty_partials
from csd.kernels.attention.triton.plan import plan_attention
from csd.kernels.backends import choose


def ours(job: Job):
    """csd's kernel, with work list and scratch memory made before, as is done once per step."""
    s = job.shape
    work = plan_attention(job.layout, s.H, s.K)
    out, programs = torch.empty_like(job.q), work.program.shape[0]
    partials = empty_partials(s.rows, s.H, s.K, s.D, programs, job.q.device)
    call = with_layout(tree_attention_triton)
    arguments = job.arguments | dict(work=work, out=out, partials=partials)
    return lambda: call(**arguments), lambda out: out


def attention_rows(shape, providers: dict, bandwidth: float, replays: int, device="cuda") -> list:
    """One row per provider; a provider that fails or whose result is wrong has no time."""
    # compilations for other shapes count against the limit of recompilations
    torch._dynamo.reset()
    job = make(shape, device)
    exact = tree_attention_ref(**job.to(torch.float64).arguments)
    jobs = [job] + [job.copy() for _ in range(copies_for(job.moved_bytes) - 1)]
    rows = []
    for name, prepare in providers.items():
        row = dict.fromkeys(("us", "p20", "p80", "percent_of_copy"))
        row = {"kernel": "tree_attention", "provider": name, "shape": str(shape)} | row
        row |= {"megabytes": job.moved_bytes / 1e6, "error": None, "note": ""}
        rows.append(row)
        try:
            call, order = prepare(job)
            row["error"] = error_of(order(call()), exact)
            if row["error"] > limit_for(job.q.dtype):
                row["note"] = "wrong"
                continue
            calls = [call] + [prepare(other)[0] for other in jobs[1:]]
            row |= _timed(calls, job.moved_bytes, bandwidth, replays)
        except Exception as error:
            row["note"] = _why(error)
        torch.cuda.empty_cache()
    return rows


def step_row(maker, name: str, bandwidth: float, replays: int) -> dict:
    """One row of an operation without a rival; it has no time if the result is wrong or fails."""
    row = {"kernel": maker.func.__name__, "provider": "csd", "shape": name}
    row |= dict.fromkeys(("us", "p20", "p80", "percent_of_copy", "megabytes", "error"))
    row |= {"note": ""}
    try:
        job = maker(0)
        row |= {"shape": f"{name} {job.size}", "megabytes": job.moved / 1e6}
        job.check()
        calls = [job.call] + [maker(seed).call for seed in range(1, copies_for(job.footprint))]
        return row | _timed(calls, job.moved, bandwidth, replays, job.operations)
    except AssertionError as error:
        return row | {"note": f"wrong: {error}"}
    except Exception as error:
        return row | {"note": _why(error)}


def _why(error: Exception) -> str:
    """Returns a short error text for a row's note, and prints the traceback to stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _timed(calls, moved: int, bandwidth: float, replays: int, operations: int = 1) -> dict:
    """Time `calls` for a row. operations: number of operations in each call."""
    us, p20, p80 = (x / operations for x in replayed(calls, replays))
    share = 100 * moved / (us * 1e-6) / bandwidth
    return {"us": us, "p20": p20, "p80": p80, "percent_of_copy": share}


def on_gpu(args) -> tuple[dict, list[dict]]:
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    rows = []
    if args.only in (None, "step"):
        ops = choose(None, device, torch.bfloat16)
        for shape in SHAPES[:2]:
            for maker in makers(ops, shape, Sizes(), device, torch.bfloat16):
                rows.append(step_row(maker, shape.name, bandwidth, args.replays))
                _keep(args.json, rows)
    if args.full and args.only in (None, "step"):
        for slots in (16, 64, 256):
            sizes = replace(Sizes(), slots=slots, rows=4 * slots)
            rows.append(_others_step(sizes, bandwidth, args.replays))
    if args.only in (None, "attention"):
        sizes = shapes(args.full)
        providers = {"csd": ours} | (QUICK_RIVALS if args.quick else RIVALS)
        if args.quick:
            sizes = [shape for shape in sizes if shape.model == sizes[0].model]
        if args.full:
            providers |= FULL_RIVALS | OTHERS
        providers |= {name: OTHERS[name] for name in args.beside}
        # flex_attention compiles for each shape, so all shapes of the other providers run first
        slow = {name: providers.pop(name) for name in list(providers) if "flex" in name}
        for some in filter(None, (providers, slow)):
            for shape in sizes:
                rows += attention_rows(shape, some, bandwidth, args.replays)
                print(common.table(rows[-len(some) :]), flush=True)
                _keep(args.json, rows)
    return {"copy_terabytes_per_second": bandwidth / 1e12}, rows


def _keep(path: str | None, rows: list[dict]) -> None:
    """Write the rows so far, since the run may be killed at a time limit."""
    common.write({"bench": "kernels", "complete": False, "rows": rows}, path)


def _others_step(sizes: Sizes, bandwidth: float, replays: int) -> dict:
    row = {"kernel": "draft_tree", "provider": "suffix-gpu", "shape": f"S={sizes.slots}"}
    row |= dict.fromkeys(("us", "p20", "p80", "percent_of_copy", "megabytes", "error"))
    try:
        us, p20, p80 = replayed([suffix_gpu_job(sizes, "cuda")], replays)
        return row | {"us": us, "p20": p20, "p80": p80, "note": "a chain of 16, own text"}
    except Exception as error:
        return row | {"note": _why(error)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the result to this file")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--full", action="store_true", help="the grid, and other packages")
    extent.add_argument("--quick", action="store_true", help="one model's shapes, beside SDPA")
    parser.add_argument("--beside", nargs="*", choices=list(OTHERS), default=[])
    parser.add_argument("--only", choices=["attention", "step"])
    parser.add_argument("--replays", type=int, default=30)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a GPU that torch can use is needed; on a CPU: pytest bench/micro")
    figures, rows = on_gpu(args)
    print(common.table(rows))
    result = {"bench": "kernels", "complete": True, "device": "cuda"} | figures
    common.finish(result | {"rows": rows}, args.json)
    return int(any(r["provider"] == "csd" and r["us"] is None for r in rows))


if __name__ == "__main__":
    sys.exit(main())
