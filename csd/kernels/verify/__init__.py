"""Sample the target at every row of the pool and descend each tree along the samples.

At row m, with x the logits [V] after repetition penalty and banned end tokens, z = x / T and
top = max z:

    kept   tokens that pass top-k, top-p, min-p and typical-p in turn, as transformers defines them
    head   the kept tokens with z >= top - 11.1; with top-k <= 1,024 all kept tokens
    rest   the other kept tokens, one atom with token id V and mass sum exp(z)
    sample = argmax( z_t + G_t  for t in head,  log(mass of rest) + G_V )

G is the Gumbel of the word of (key, token, generated position, sample index). Of equal scores the
smaller token id wins. If the rest wins, its token is drawn by inverse CDF in token order with a
word of its own. So a sample is a fixed function of the row's prefix and noise, whatever was
drafted. Temperature 0 takes the largest x.

A row is accepted when it is a root, or its parent is accepted and sampled this row's token. The
samples at accepted rows are the committed tokens, cut after an end token and at `max_new`.

On a GPU, four launches: maxima and log-sum-exp, which is the first read of the logits, the list of
the head from the groups of 64 with some of its tokens (both in `triton/scan.py`), sampling
(`triton/sample.py`), and the descent (`triton/descend.py`), which in an engine's step also advances
the slots and writes the snapshot. A row whose head is too long for its list is sampled from the
logits, and a filter then costs at most one more pass over them. Passes are repeated only if a cut
falls below the head, or among more nearly equal tokens than the list has room for.
"""

from collections.abc import Callable
from typing import Any

import torch

from csd.kernels.common.operator import RecordOperator, launcher
from csd.kernels.verify.reference import verify_ref
from csd.kernels.verify.views import POOL, SLOTS
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import Verdict, empty_verdict

__all__ = ["decide_triton", "token_logprobs_triton", "verify", "verify_ref", "verify_triton"]


@launcher
def verify_triton() -> Callable:
    from csd.kernels.verify.triton.launch import verify_triton

    return verify_triton


@launcher
def decide_triton() -> Callable:
    from csd.kernels.verify.triton.launch import decide_triton

    return decide_triton


@launcher
def token_logprobs_triton() -> Callable:
    from csd.kernels.verify.triton.launch import token_logprobs_triton

    return token_logprobs_triton


def _fake(logits: torch.Tensor, pool: Any, slots: Any) -> Verdict:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return empty_verdict(logits.shape[0], slots.count, logits.device, dtype)


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.numba.tensors import readable
    from csd.kernels.verify.cpu.path import verify_all

    return (lambda logits, pool, slots: readable(logits)), verify_all


_verify = RecordOperator(
    "verify",
    ("Tensor logits", POOL, SLOTS),
    verify_ref,
    verify_triton,
    loop=_loop,
    returns=Verdict,
    fake=_fake,
)


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Returns samples at every row of `pool` and the paths that they accept.

    logits: [M, V], contiguous; float64 only on a CPU. 16-bit logits are processed in float32.
    """
    if logits.dim() != 2 or logits.shape[0] != pool.rows:
        raise ValueError(f"logits must have shape [{pool.rows}, V], got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if logits.is_cuda and logits.dtype == torch.float64:
        raise ValueError("logits must be float32, float16 or bfloat16 on a GPU, got float64")
    if not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous, got strides {logits.stride()}")
    words = (logits.shape[1] + 31) // 32
    sizes = {"M": pool.rows, "S": slots.count, "words": words}
    _verify.check(sizes, logits.device, pool, slots)
    return _verify(logits, pool, slots)
