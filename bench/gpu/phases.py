"""Where a step's time goes: device time of every kernel, by the phase it belongs to."""

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# of the device alone: tracing the host would slow it down
ACTIVITIES = [ProfilerActivity.CUDA]

# csd's own kernels by their whole names, others by what their names hold: a name of PyTorch's may
# contain masked_fill_kernel
PHASES = {
    "attention": "tree_attention|plan_attention|merge_partials|plan_exact|pages|tail",
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
