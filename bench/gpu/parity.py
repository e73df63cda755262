"""Triton kernels and static steps against the references, on the device."""

import inspect
import statistics
import subprocess
import sys
from dataclasses import fields, replace

import torch

import csd
from bench.gpu.section import Section
from bench.shapes import SHAPES, random_model
from csd.models.decoder import Decoder, Layer

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 30, 31, 9, 8]]
SAMPLES, NEW = 4, 24


def run(section: Section) -> None:
    """A row a comparison; raises AssertionError at the end when one failed."""
    engines(section)
    logits(section)
    kernels(section)
    wrong = [row["what"] for row in section.rows if not row["same"]]
    assert not wrong, f"not the same: {', '.join(wrong)}"


def engines(section: Section) -> None:
    """Whole generations in float32 must have the same tokens however they run."""
    device = section.device
    sides = {"reference": dict(kernels="reference"), "plain": dict(kernels="reference")}
    if section.cuda:
        sides["triton"] = dict(kernels="triton")
    if "static" in inspect.signature(csd.Engine).parameters:
        for options in sides.values():
            options["static"] = False
        sides["static"] = dict(kernels="triton" if section.cuda else "reference", static=True)
    cases = [dict(temperature=0.0), dict(temperature=0.7), dict(temperature=1.0, top_p=0.9)]
    found: dict[str, list] = {}
    for name, options in sides.items():
        made = random_model("tiny", device, torch.float32)
        with csd.Engine(made, max_slots=6, **options) as engine:
            found[name] = [
                [
                    out.tokens
                    for out in engine.generate(
                        PROMPTS, num_samples=SAMPLES, max_new_tokens=NEW, seed=1, budget=10,
                        speculate=name != "plain", **case,
                    )
                ]
                for case in cases
            ]  # fmt: skip
    for name in list(sides)[1:]:
        for case, got, want in zip(cases, found[name], found["reference"], strict=True):
            what = f"{name} against reference, {case}"
            section.add(what=what, same=got == want)


def logits(section: Section) -> None:
    """Two layers of each large shape in bfloat16: how far Triton and references are from float32.

    Compared are the log-probabilities of committed tokens. Triton's may be off by 1.5 times as much
    as PyTorch's own bfloat16, beyond what chance does to so few tokens.
    """
    if not section.cuda:
        section.skip("logits of the large shapes: Triton kernels need a GPU")
        return
    for name in ("llama-3.1-8b", "qwen2.5-7b"):
        low = random_model(replace(SHAPES[name], layers=2), section.device)
        sides = {
            "exact": (widened(low), "reference"),
            "reference": (low, "reference"),
            "triton": (low, "triton"),
        }
        outs = {}
        for side, (made, which) in sides.items():
            with csd.Engine(made, max_slots=4, kernels=which) as engine:
                outs[side] = engine.generate(
                    list(range(100, 400)), num_samples=4, max_new_tokens=12, seed=1, budget=12,
                    temperature=0.7,
                )  # fmt: skip
        errors = {side: differences(outs[side], outs["exact"]) for side in ("reference", "triton")}
        mean = {side: sum(x) / max(len(x), 1) for side, x in errors.items()}
        section.add(
            what=f"{name}, 2 layers, bfloat16",
            same=within(errors["triton"], errors["reference"]) and len(errors["triton"]) >= 8,
            mean_error=mean["triton"],
            mean_error_of_pytorch=mean["reference"],
            tokens_compared=len(errors["triton"]),
        )
        del low, sides
        torch.cuda.empty_cache()


def within(errors: list[float], allowed: list[float], factor: float = 1.5) -> bool:
    """Whether the mean of `errors` is at most `factor` times that of `allowed`.

    Both are estimated from few tokens: false only where the excess is above three standard errors.
    """
    excess = statistics.fmean(errors) - factor * statistics.fmean(allowed)
    variance = sum(
        scale**2 * statistics.variance(x) / len(x) for scale, x in ((1, errors), (factor, allowed))
    )
    return excess <= 3 * variance**0.5


def differences(a, b) -> list[float]:
    """Of log-probabilities, up to where rounding lets a sample go another way."""
    found = []
    for s, t in zip(a, b, strict=True):
        rows = zip(s.tokens, t.tokens, s.raw_logprobs, t.raw_logprobs, strict=True)
        for x, y, p, q in rows:
            if x != y:
                break
            found.append(abs(p - q))
    return found


def widened(decoder: Decoder) -> Decoder:
    """The same weights in float32."""

    def wide(x):
        return x if x is None else x.float()

    layers = [
        Layer(**{f.name: wide(getattr(layer, f.name)) for f in fields(Layer)})
        for layer in decoder.layers
    ]
    return Decoder(
        decoder.config, wide(decoder.embedding), layers, wide(decoder.norm), wide(decoder.head)
    )


def kernels(section: Section) -> None:
    """Each kernel's own check, where there is a bench for it."""
    from importlib.util import find_spec

    if not section.cuda or find_spec("bench.kernels") is None:
        section.skip("single kernels: bench.kernels on a GPU checks them")
        return
    command = [sys.executable, "-m", "bench.kernels", "--device", "cuda", "--only", "step"]
    command += ["--json", str(section.out / "kernels.json")]
    try:
        done = subprocess.run(
            command, timeout=max(section.left, 1), capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        # what was not finished is not known to be wrong
        section.skip("single kernels: no time left for all of them")
        return
    print(done.stdout[-3000:])
    section.add(what="every kernel of a step", same=done.returncode == 0, log=done.stderr[-1500:])
