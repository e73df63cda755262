"""`csd doctor` at every shape and dtype of later sections, before they run.

Later sections do not check their kernels again, which would only repeat the same errors.
"""

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import torch

from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import shapes
from bench.lib.shapes import SHAPES
from csd.doctor import check


def run(section: Section) -> None:
    """Add one row per shape, dtype and kind of engine; raises RuntimeError if a check fails."""
    wanted = jobs(section)
    # each check holds a context on the device, and its reference computations use a core
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(len(wanted), cores // 2))) as pool:
        reports = pool.map(lambda job: examined(section, job), wanted)
        for job, outcome in zip(wanted, reports, strict=True):
            add(section, job, outcome)
    wrong = [f"{r['shape']}, {r['dtype']}: {r['error']}" for r in section.rows if not r["passed"]]
    if wrong:
        raise RuntimeError("; ".join(wrong))


def jobs(section: Section) -> list[dict]:
    """Checks to run: for `parity`'s float32 models, then for the other sections' models."""
    tiny = dict(shape="tiny", dtype="float32", exact=False)
    if not section.cuda:
        return [tiny]
    dtype = str(section.dtype).removeprefix("torch.")
    plain, exact = (
        [dict(shape=name, dtype=dtype, exact=exact) for name in shapes(section)]
        for exact in (False, True)
    )
    if section.call == 2:
        # `equality` has the first shape with exact rows, `end_to_end` the other one
        return [*exact[:1], *plain[1:]]
    return [tiny, *plain] if section.call else [tiny, *plain, *exact]


def examined(section: Section, job: dict) -> dict:
    """Report of one check, which runs in a separate process since a kernel may fault."""
    job = job | {"device": str(section.device)}
    command = [sys.executable, "-m", "bench.gpu.sections.doctor", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(section.left, 1))
    except subprocess.TimeoutExpired:
        return {"late": True}
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        report = {"error": f"the process ended with code {done.returncode}: {last[0]}"}
    return report | {"log": done.stderr[-6000:]}


def add(section: Section, job: dict, outcome: dict) -> None:
    if "late" in outcome:
        section.cut_off(f"the check of {job}")
        return
    wrong = [
        f"{c['name']}: {c['error'] or 'it was not called'}"
        for c in outcome.get("checks", [])
        if c["error"] or not c["calls"]
    ]
    error = outcome.pop("error", None) or "; ".join(wrong) or None
    if error is None:
        outcome.pop("log", None)
    section.add(**job, passed=error is None, error=error, **outcome)
    exact = ", exact" * job["exact"]
    print(f"  {job['shape']}, {job['dtype']}{exact}: {error or 'passed'}", flush=True)


def main(job: str) -> None:
    """Check the operations and print the report as one JSON object on the last line."""
    # with the tracebacks of checks that failed
    logging.basicConfig(level=logging.INFO)
    options = json.loads(job)
    report = check(
        options["device"],
        getattr(torch, options["dtype"]),
        SHAPES[options["shape"]],
        exact=options["exact"],
    )
    output = asdict(report)
    # the job has the dtype
    del output["dtype"]
    print(json.dumps(output))


if __name__ == "__main__":
    main(sys.argv[1])
