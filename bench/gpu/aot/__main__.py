"""Compile every kernel for GPUs that this machine does not have, and show its resource use.

python -m bench aot --json F [--targets sm_90 ..] [--dtypes bf16 ..] [--shapes smollm2-135m ..]
    [--kernels EXPRESSION]

One row per specialisation: registers, stack, spills, instructions, shared memory and the target's
limit, programs that a multiprocessor runs at once, loads from global memory of 16 bytes and of one
or two, seconds. The exit status is 1 if one does not compile, does not fit, or spills in bf16 on
sm_90.
"""

import argparse

import triton

from bench.gpu.aot import OLDER, OTHER_SHAPES, SHAPES, TARGETS, problems, run, table
from bench.lib.common import finish, write


def main() -> int:
    named = {s.name: s for s in SHAPES + OTHER_SHAPES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=[*TARGETS, *OLDER])
    parser.add_argument(
        "--dtypes", nargs="+", default=["bf16", "fp16", "fp32"], choices=["bf16", "fp16", "fp32"]
    )
    parser.add_argument("--shapes", nargs="+", default=list(named))
    parser.add_argument(
        "--kernels", default="", help="only names in which this regular expression is found"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    tasks = [(t, d, named[s]) for t in args.targets for d in args.dtypes for s in args.shapes]
    # it is searched in "TARGET SHAPE KERNEL"
    without = rf"^(?!\S+ \S+ .*(?:{args.kernels}))" if args.kernels else ""
    rows = run(tasks, args.jobs, without=without)
    rows.sort(key=lambda r: (r["kernel"], r["target"], r["dtype"], r["shape"]))
    print(table(rows))
    bad = [row for row in rows if problems(row)]
    result = {"triton": triton.__version__, "kernels": len(rows), "bad": len(bad)}
    write(result | {"rows": rows}, args.json, indent=1)
    finish(result)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
