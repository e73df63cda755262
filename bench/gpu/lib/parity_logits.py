"""Errors of log-probabilities of the large shapes in bfloat16: csd's kernels and PyTorch's."""

import statistics
from dataclasses import replace

import torch

import csd
from bench.gpu.lib.section import Section
from bench.gpu.lib.workload import shapes
from bench.lib.shapes import SHAPES, converted, random_model


def logits(section: Section) -> None:
    """Compare Triton and references in 16 bits with float32, for two layers of each large shape.

    The errors are those of the log-probabilities of committed tokens. Triton's may be 1.5 times
    those of PyTorch's own, plus what chance explains with few tokens (`within`).
    """
    if not section.cuda:
        section.skip("logits of the large shapes: Triton kernels need a GPU")
        return
    for name in shapes(section):
        if section.left <= 0:
            section.cut_off(f"logits of {name}")
            continue
        low = random_model(replace(SHAPES[name], layers=2), section.device, section.dtype)
        sides = {
            "exact": (converted(low, torch.Tensor.float), "reference"),
            "reference": (low, "reference"),
            "triton": (low, "triton"),
        }
        outs = {}
        for side, (made, which) in sides.items():
            with csd.Engine(made, max_slots=4, kernels=which, self_check=False) as engine:
                outs[side] = engine.generate(
                    list(range(100, 400)),
                    num_samples=4,
                    max_new_tokens=12,
                    seed=1,
                    budget=12,
                    temperature=0.7,
                )
        errors = {side: differences(outs[side], outs["exact"]) for side in ("reference", "triton")}
        mean = {side: sum(x) / max(len(x), 1) for side, x in errors.items()}
        section.add(
            what=f"{name}, 2 layers, {str(section.dtype).removeprefix('torch.')}",
            same=within(errors["triton"], errors["reference"]) and len(errors["triton"]) >= 8,
            mean_error=mean["triton"],
            mean_error_of_pytorch=mean["reference"],
            tokens_compared=len(errors["triton"]),
        )
        del low, sides
        torch.cuda.empty_cache()


def within(errors: list[float], allowed: list[float], factor: float = 1.5) -> bool:
    """True if the mean of `errors` is at most `factor` times that of `allowed`.

    Both are estimated from few tokens: False only if the excess exceeds three standard errors.
    """
    excess = statistics.fmean(errors) - factor * statistics.fmean(allowed)
    variance = sum(
        scale**2 * statistics.variance(x) / len(x) for scale, x in ((1, errors), (factor, allowed))
    )
    return excess <= 3 * variance**0.5


def differences(a, b) -> list[float]:
    """Differences of log-probabilities, up to each sample's first different token."""
    gaps = []
    for s, t in zip(a, b, strict=True):
        rows = zip(s.tokens, t.tokens, s.raw_logprobs, t.raw_logprobs, strict=True)
        for x, y, p, q in rows:
            if x != y:
                break
            gaps.append(abs(p - q))
    return gaps
