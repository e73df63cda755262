"""Sample the target at every row of the pool and descend each tree along what was sampled.

At row m, with x the logits [V] after repetition penalty and banned end tokens, z = x / T and
top = max z:

    kept   tokens that pass top-k, then top-p, then min-p, each as transformers defines it
    head   the kept tokens with z >= top - 11.1; with top-k <= 1,024 all kept tokens
    rest   the other kept tokens, one atom with token id V and mass sum exp(z)
    sample = argmax( z_t + G_t  for t in head,  log(mass of rest) + G_V )

G is the Gumbel of the word of (key, token, generated position, sample index). Equal scores go to
the smaller token id. If the rest wins, it is resolved by inverse CDF in token order with a word of
its own. So a sample is a fixed function of the row's prefix and noise, whatever was drafted.
Temperature 0 takes the largest x.

A row is accepted when it is a root, or its parent is accepted and sampled this row's token. The
samples at accepted rows are the committed tokens, cut after an end token and at `max_new`.

On a GPU, four launches: maxima and log-sum-exp (`verify_scan_kernel.py`, the first read of the
logits), the head's list (there too, from the groups of 64 that hold some of it), sampling
(`verify_sample_kernel.py`), and the descent (`verify_descend_kernel.py`). A row whose head is too
long for its list, or whose top-p cut falls below it, is sampled from the logits by the same passes.
"""

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
import triton

from csd.kernels.aot import Job, Shape
from csd.kernels.checks import check_fields
from csd.kernels.verify_descend_kernel import _descend_kernel
from csd.kernels.verify_ref import verify_ref
from csd.kernels.verify_sample_kernel import _sample_kernel
from csd.kernels.verify_scan_kernel import GROUP, _compact_kernel, _scan_kernel
from csd.pool import MAX_DEPTH, Pool
from csd.slots import MAX_STOP_IDS, Slots
from csd.verdict import TOP, Verdict

__all__ = ["verify", "verify_ref", "verify_triton"]

# chunks of a row, tokens read at once, tokens that a chunk and a row can list
SPLITS, BLOCK, CAP, LIST = 16, 1024, 512, 2048
# tokens that the first read has on their way at once; groups that the list's maker looks at, and
# the tokens of near ones that it reads
SCAN = 4096
COMPACT_TILE, COMPACT, COMPACT_WARPS = 128, 256, 1
SAMPLE_WARPS = 8
ACCEPT = MAX_DEPTH + 1


def verify_triton(
    logits: torch.Tensor, pool: Pool, slots: Slots, out: Verdict | None = None
) -> Verdict:
    """Four launches over logits [M, V], float32, float16 or bfloat16; into `out` where given."""
    M, V = logits.shape
    S, device = slots.live.shape[0], logits.device
    out = out or _empty_verdict(M, S, device)
    groups = triton.cdiv(V, GROUP.value)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    tops, raw_tops, raw_sums = (scratch(M, SPLITS) for _ in range(3))
    group_tops, group_sums = scratch(M, groups), scratch(M, groups)
    head_tokens = scratch(M, SPLITS, CAP, dtype=torch.int32)
    head_distances = scratch(M, SPLITS, CAP)
    head_counts, rests = scratch(M, SPLITS, dtype=torch.int32), scratch(M, SPLITS)
    bad_rows = scratch(M, dtype=torch.int32)

    row = dict(
        logits_ptr=logits,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        generated_ptr=slots.generated,
        min_new_ptr=slots.min_new,
        temperature_ptr=slots.temperature,
        penalty_ptr=slots.penalty,
        seen_ptr=slots.seen,
        ban_ids_ptr=slots.ban_ids,
        top_ptr=tops,
        vocab=V,
        words=slots.seen.shape[1],
        # whole blocks, so that a group of tokens lies in one chunk
        chunk=triton.cdiv(triton.cdiv(V, SPLITS), SCAN) * SCAN,
        STOPS=slots.ban_ids.shape[1],
        SPLITS=SPLITS,
        num_warps=4,
    )
    raw = dict(raw_top_ptr=raw_tops, raw_sum_ptr=raw_sums)
    head = dict(
        head_token_ptr=head_tokens,
        head_distance_ptr=head_distances,
        head_count_ptr=head_counts,
        rest_ptr=rests,
        top_k_ptr=slots.top_k,
        top_p_ptr=slots.top_p,
        min_p_ptr=slots.min_p,
        CAP=CAP,
    )
    grouped = dict(group_top_ptr=group_tops, group_sum_ptr=group_sums, groups=groups)
    _scan_kernel[(M, SPLITS)](**row, **raw, **grouped, BLOCK=SCAN, BLOCK_X=BLOCK)
    _compact_kernel[(M, SPLITS)](
        **row | {"num_warps": COMPACT_WARPS}, **head, **grouped, BLOCK=COMPACT, TILE=COMPACT_TILE,
        BLOCK_G=triton.next_power_of_2(groups),
    )
    _sample_kernel[(M,)](
        **row | {"num_warps": SAMPLE_WARPS},
        **raw,
        **head,
        key_ptr=slots.key,
        index_ptr=slots.sample,
        list_token_ptr=scratch(M, LIST, dtype=torch.int32),
        list_distance_ptr=scratch(M, LIST),
        LIST=LIST,
        BLOCK=BLOCK,
        sample_ptr=out.sample,
        logprob_ptr=out.logprob,
        raw_logprob_ptr=out.raw_logprob,
        top_token_ptr=out.top_token,
        top_prob_ptr=out.top_prob,
        bad_row_ptr=bad_rows,
    )
    _descend_kernel[(S,)](
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        depth_ptr=pool.depth,
        ancestors_ptr=pool.ancestors,
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        generated_ptr=slots.generated,
        max_new_ptr=slots.max_new,
        temperature_ptr=slots.temperature,
        stop_ids_ptr=slots.stop_ids,
        sample_ptr=out.sample,
        bad_row_ptr=bad_rows,
        logprob_ptr=out.logprob,
        raw_logprob_ptr=out.raw_logprob,
        accept_row_ptr=out.accept_row,
        accept_count_ptr=out.accept_count,
        finish_ptr=out.finish,
        bad_ptr=out.bad,
        A=ACCEPT,
        BLOCK_A=triton.next_power_of_2(ACCEPT),
        STOPS=slots.stop_ids.shape[1],
        num_warps=4,
    )
    return out


def _empty_verdict(
    rows: int, slots: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Verdict:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Verdict(
        sample=empty(rows),
        logprob=empty(rows, dtype=dtype),
        raw_logprob=empty(rows, dtype=dtype),
        top_token=empty(rows, TOP),
        top_prob=empty(rows, TOP, dtype=torch.float32),
        accept_row=empty(slots, ACCEPT),
        accept_count=empty(slots),
        finish=empty(slots),
        bad=empty(slots, dtype=torch.bool),
    )


_POOL = (
    "token", "parent", "slot", "depth", "ancestors", "slot_start", "slot_nodes",
)  # fmt: skip
_SLOTS = (
    "live", "key", "sample", "generated", "temperature", "top_k", "top_p", "min_p", "penalty",
    "seen", "max_new", "min_new", "stop_ids", "ban_ids",
)  # fmt: skip


@torch.library.custom_op("csd::verify", mutates_args=(), device_types="cpu")
def _verify(
    logits: torch.Tensor, pool: list[torch.Tensor], slots: list[torch.Tensor]
) -> list[torch.Tensor]:
    return _run(verify_ref, logits, pool, slots)


@_verify.register_kernel("cuda")
def _(logits: torch.Tensor, pool: list[torch.Tensor], slots: list[torch.Tensor]) -> Any:
    with torch.cuda.device_of(logits):
        return _run(verify_triton, logits, pool, slots)


@_verify.register_fake
def _(logits: torch.Tensor, pool: list[torch.Tensor], slots: list[torch.Tensor]) -> Any:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return _tensors(_empty_verdict(logits.shape[0], slots[0].shape[0], logits.device, dtype))


def _run(
    run: Callable, logits: torch.Tensor, pool: list[torch.Tensor], slots: list[torch.Tensor]
) -> list[torch.Tensor]:
    rows = SimpleNamespace(rows=logits.shape[0], **dict(zip(_POOL, pool, strict=True)))
    state = SimpleNamespace(count=slots[0].shape[0], **dict(zip(_SLOTS, slots, strict=True)))
    return _tensors(run(logits, rows, state))


def _tensors(verdict: Verdict) -> list[torch.Tensor]:
    return [getattr(verdict, f.name) for f in fields(Verdict)]


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Samples at every row of `pool` and the paths that they accept.

    logits: [M, V], contiguous; float64 too on a CPU. 16-bit logits are processed in float32.
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
    check_fields("slots", slots, _SLOTS, sizes, logits.device)
    check_fields("pool", pool, _POOL, sizes, logits.device)
    lists = ([getattr(x, n) for n in names] for x, names in ((pool, _POOL), (slots, _SLOTS)))
    return Verdict(*_verify(logits, *lists))


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    types = {name: "*i64:16" for name in ("key", "ancestors")}
    types |= {name: "*fp64:16" for name in ("temperature", "penalty", "top_p", "min_p")}
    # rows of logits that begin at multiples of 16 bytes are read 16 bytes at a time
    types |= {"vocab": "i32" if shape.vocab % 16 else "i32:16", "chunk": "i32:16"}
    types |= {name: "i32" for name in ("words", "groups")}
    types |= {name: "*fp32:16" for name in (
        "top", "raw_top", "raw_sum", "group_top", "group_sum", "head_distance", "list_distance",
        "rest", "logprob", "raw_logprob", "top_prob",
    )}  # fmt: skip
    types |= {"logits": f"*{dtype}:16", "bad": "*u1:16"}
    constants = dict(
        STOPS=MAX_STOP_IDS, SPLITS=SPLITS, BLOCK=BLOCK, BLOCK_X=BLOCK, TILE=COMPACT_TILE, CAP=CAP,
        LIST=LIST, A=ACCEPT,
        BLOCK_A=triton.next_power_of_2(ACCEPT),
        BLOCK_G=triton.next_power_of_2(triton.cdiv(shape.vocab, GROUP.value)),
    )  # fmt: skip
    jobs = []
    for kernel in (_scan_kernel, _compact_kernel, _sample_kernel, _descend_kernel):
        args = {}
        for param in kernel.params:
            name = param.name.removesuffix("_ptr")
            args[param.name] = constants[name] if param.is_constexpr else types.get(name, "*i32:16")
        if kernel in (_scan_kernel, _compact_kernel):
            args["BLOCK"] = SCAN if kernel is _scan_kernel else COMPACT
        name = kernel.__name__.strip("_").removesuffix("_kernel")
        warps = {_sample_kernel: SAMPLE_WARPS, _compact_kernel: COMPACT_WARPS}.get(kernel, 4)
        jobs.append(Job(name=f"verify {name}", kernel=kernel, args=args, num_warps=warps))
    return jobs
