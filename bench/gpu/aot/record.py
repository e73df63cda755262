"""The compilation jobs of a model's shape for the targets of `make aot`."""

from dataclasses import replace

from bench.gpu.aot.launches import launches
from bench.lib.kernel_shape import Shape
from csd.kernels.common.compile_jobs import CompileJob, named, recording

# targets of `make aot`
TARGETS = {
    name: named(name) for name in ("sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942")
}
# compiled when they are named: csd takes no bfloat16 model there
OLDER = {"sm_75": named("sm_75")}


def jobs_of(target: str, shape: Shape, dtype: str) -> list[CompileJob]:
    """Record the compilation jobs of a model's step for the target, each job once."""
    by_key: dict[tuple, CompileJob] = {}
    for label, launch in launches(shape, dtype):
        with recording(named(target)) as jobs:
            launch()
        for job in jobs:
            name = f"{job.name}, {label}" if label else job.name
            job = replace(job, name=name)
            by_key.setdefault(job.key, job)
    return list(by_key.values())
