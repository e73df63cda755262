"""The receipt of a record: the weights, versions and machine its samples came from.

If `exact_on` is "every x86 CPU", the samples can be drawn again, to the bit, on another machine
with the same weights (`csd audit`). A receipt is a claim like the samples: by itself it proves
nothing.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict

import numpy as np

from csd.utils.device import cpu_name, instructions

PACKAGES = "csd-llm", "torch", "numpy", "numba", "transformers"


class Receipt(TypedDict):
    """Everything that samples depend on beside their prompt, seed and options."""

    model: str | None  # `csd.models.fused.held.weights_hash`
    exact_on: str | None  # `Engine.exact_on`
    dtype: str
    device: str
    cpu: str
    instructions: list[str]
    versions: dict[str, str]
    # hash of each sample's log-probabilities, in the order of the samples; none where the bits are
    # not exact, and so may differ from call to call
    logprobs: list[str]


def receipt_of(model: str | None, exact_on: str | None, dtype: str, device: str) -> Receipt:
    """The receipt of samples that this process draws, without these."""
    return Receipt(
        model=model,
        exact_on=exact_on,
        dtype=dtype,
        device=device,
        cpu=cpu_name(),
        instructions=instructions(),
        versions=_versions(),
        logprobs=[],
    )


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def with_logprobs(receipt: Receipt, samples: Iterable[Iterable[float]]) -> Receipt:
    """The receipt with the log-probabilities of each sample."""
    hashes = [bits_hash(logprobs) for logprobs in samples] if receipt["exact_on"] else []
    return {**receipt, "logprobs": hashes}


def bits_hash(logprobs: Iterable[float]) -> str:
    """Hash of a sample's log-probabilities as float32."""
    return hashlib.sha256(np.array([*logprobs], "<f4").tobytes()).hexdigest()[:32]


def differences(recorded: Receipt, own: Receipt) -> list[str]:
    """Differences of two receipts, a line each: the record's value, then this machine's."""
    both: list[dict[str, Any]] = [{**recorded}, {**own}]
    fields = ("model", "exact_on", "dtype", "device", "cpu", "instructions")
    values = {name: [_shown(r[name]) for r in both] for name in fields}
    values |= {name: [r["versions"].get(name, "none") for r in both] for name in PACKAGES}
    return [
        f"{name}: {there} here {here}" for name, (there, here) in values.items() if there != here
    ]


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)
