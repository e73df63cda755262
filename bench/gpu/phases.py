"""Where a step's time goes: device time of every kernel, by the phase it belongs to."""

import re

import torch

# of csd's own kernels, by the names they have
PHASES = {
    "attention": r"tree_attention|plan_attention|merge_partials",
    "elementwise": r"rms_norm|rotary|swiglu",
    "propose": r"grow_kernel|fill_kernel|lookup",
    "verify": r"scan_kernel|compact_kernel|sample_kernel|descend_kernel",
    "commit": r"commit_kv|advance_slots",
    "insert": r"observe_kernel|claim_kernel|lead_kernel|allocate_kernel|_merge_kernel",
    "report": r"snapshot_kernel",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk",
}


def phase_of(kernel: str) -> str:
    """The phase of a kernel's name; "other" for what PyTorch launches around csd's kernels."""
    for phase, pattern in PHASES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return phase
    return "other"


def device_seconds(run) -> dict[str, float]:
    """Seconds of the device by phase over one call of `run`, inside graphs too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        phase = phase_of(event.key)
        found[phase] = found.get(phase, 0.0) + event.self_device_time_total / 1e6
    return found
