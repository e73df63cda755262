"""Device time of every kernel of a step, by phase."""

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.section import Section
from bench.gpu.timed import settled, shortened
from bench.gpu.workload import forced
from csd.state.phases import KINDS

# of the device alone: tracing the host would slow it down
ACTIVITIES = [ProfilerActivity.CUDA]

# csd's own kernels by their whole names, others by what their names hold: a name of PyTorch's may
# contain masked_fill_kernel
PHASES = {
    "attention": "tree_attention|plan_attention|first_keys|merge_partials|plan_exact|pages|tail",
    "elementwise": "rms_norm|rotary|swiglu",
    "propose": "grow|fill",
    "verify": "scan|compact|sample|descend|finish",
    "commit": "commit_kv|advance_slots",
    "insert": "observe|claim|observe_claim|lead|allocate|merge",
    "report": "snapshot",
    "matrix products": "row_linear|add_splits|gated_linear",
}
PRODUCTS = re.compile("gemm|gemv|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)


def phase_of(kernel: str) -> str:
    """The phase of a kernel's name; "other" for what PyTorch launches around csd's kernels."""
    for phase, names in PHASES.items():
        if re.fullmatch(f"_({names})_kernel", kernel):
            return phase
    return "matrix products" if PRODUCTS.search(kernel) else "other"


def device_seconds(run) -> dict[str, float]:
    """Seconds of the device by phase over one call of `run`, inside graphs too."""
    # what was launched before may still run
    torch.cuda.synchronize()
    with profile(activities=ACTIVITIES) as profiler:
        run()
        torch.cuda.synchronize()
    return by_phase(profiler.events())


def by_phase(events) -> dict[str, float]:
    """Seconds by phase of a profile's events; the host's calls among them are left out."""
    found: dict[str, float] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA:
            phase = phase_of(event.name)
            found[phase] = found.get(phase, 0.0) + event.self_device_time_total / 1e6
    return found


def phases(section: Section, engine, picked: list, prompt_tokens: int) -> dict:
    """Milliseconds of a step by phase: the device's, or the host's clock where there is none.

    The prompts' pass is no part of it. On a device the time of a run that draws one token a sample
    is taken off, as it is off `step ms`: that pass and the first step.
    """
    run = forced(engine, picked, prompt_tokens, speculate=True)
    if not section.cuda:
        out = run()[0]
        spent = {k: v for k, v in out.stats.seconds.items() if k not in ("prefill", *KINDS)}
        return {k: 1e3 * v / out.stats.steps for k, v in spent.items()}
    first = forced(engine, shortened(picked, 1), prompt_tokens, speculate=False)
    # the longer one first: its caches are large enough for both
    spent, results = profiled(engine, run)
    begun, _ = profiled(engine, first)
    steps = max(max(out.stats.steps for out in results) - 1, 1)
    # a phase of nearly nothing may come out less than that
    return {k: 1e3 * max(v - begun.get(k, 0.0), 0.0) / steps for k, v in spent.items()}


def profiled(engine, run) -> tuple[dict, list]:
    """The device's seconds by phase, and the results, of a run behind one that nothing watches."""
    run()

    def once() -> tuple[dict, list]:
        results: list = []
        return device_seconds(lambda: results.extend(run())), results

    return settled(engine, once)
