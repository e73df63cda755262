"""Device time of every kernel of a step, by phase."""

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.lib.section import Section
from bench.gpu.lib.timed import settled, shortened
from bench.gpu.lib.workload import forced
from csd.utils.phases import KINDS

# the device only: tracing the host would slow it down
ACTIVITIES = [ProfilerActivity.CUDA]

# csd's own kernels by their whole names, others by parts of their names: a name of PyTorch's may
# contain masked_fill_kernel
PHASES = {
    "attention": "tree_attention|plan_attention|first_keys|merge_partials|plan_exact|pages|tail",
    "elementwise": "rms_norm|rotary|swiglu",
    "propose": "grow|fill",
    "verify": "scan|compact|sample|finish",
    "commit": "commit_kv|advance_slots",
    "insert": "claim|observe_claim|lead|allocate|merge",
    "report": "snapshot",
    "matrix products": "row_linear|add_splits|gated_linear",
}
PRODUCTS = re.compile("gemm|gemv|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)


def phase_of(kernel: str) -> str:
    """Phase of a kernel by its name; "other" for PyTorch's kernels around those of csd."""
    for phase, names in PHASES.items():
        if re.fullmatch(f"({names})_kernel", kernel):
            return phase
    return "matrix products" if PRODUCTS.search(kernel) else "other"


def device_seconds(run) -> dict[str, float]:
    """Device seconds by phase of one call of `run`, including kernels in graphs."""
    # earlier launches may still run
    torch.cuda.synchronize()
    with profile(activities=ACTIVITIES) as profiler:
        run()
        torch.cuda.synchronize()
    return by_phase(profiler.events())


def by_phase(events) -> dict[str, float]:
    """Seconds by phase of a profile's events, without those of the host."""
    by_phase: dict[str, float] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            phase = phase_of(event.name)
            by_phase[phase] = by_phase.get(phase, 0.0) + event.self_device_time_total / 1e6
    return by_phase


def phases(section: Section, engine, picked: list, prompt_tokens: int) -> dict:
    """Milliseconds of a step by phase: the device's, or without a device the host's.

    The prompts' pass is not included. On a device, the time of a run that draws one token per
    sample (that pass and the first step) is subtracted, as it is from `step ms`.
    """
    run = forced(engine, picked, prompt_tokens, speculate=True)
    if not section.cuda:
        out = run()[0]
        spent = {k: v for k, v in out.stats.seconds.items() if k not in ("prefill", *KINDS)}
        return {k: 1e3 * v / out.stats.steps for k, v in spent.items()}
    first = forced(engine, shortened(picked, 1), prompt_tokens, speculate=False)
    # the longer run first, whose caches are large enough for both
    spent, results = profiled(engine, run)
    begun, _ = profiled(engine, first)
    steps = max(max(out.stats.steps for out in results) - 1, 1)
    # a very short phase may have a negative difference
    return {k: 1e3 * max(v - begun.get(k, 0.0), 0.0) / steps for k, v in spent.items()}


def profiled(engine, run) -> tuple[dict, list]:
    """Device seconds by phase, and results, of a run after a warm-up without the profiler."""
    run()

    def once() -> tuple[dict, list]:
        results: list = []
        return device_seconds(lambda: results.extend(run())), results

    return settled(engine, once)
