"""Verification along the accepted paths in one call: the samples of `verify_ref`.

A slot's root is sampled, then its child whose token it drew, and so on until there is no such child
or the sample ends; rows beside the path are not read.

The same loop samples every row, or computes log-probabilities of given tokens: see the modes.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.records import Sizes, opener
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.cpu.heads import in_loops
from csd.kernels.verify.cpu.rows import F32, F64, sample_row, workspace, write_filtered
from csd.kernels.verify.reference import descend_ref, verify_ref
from csd.kernels.verify.token_logprobs import TokenLogprobs, token_logprobs_ref
from csd.kernels.verify.views import POOL, SLOTS, VERDICT
from csd.state.filters import is_greedy
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, LENGTH, RUNNING, STOP, Verdict, empty_verdict

open_pool, open_slots, open_verdict = opener(POOL), opener(SLOTS), opener(VERDICT)

INT = np.empty(0, np.int32)
# modes: an entry is a slot's path, one row, or one row with a given token
PATH, ROW, GIVEN = 0, 1, 2


@by_threads
def _follow(
    part,
    parts,
    sizes,  # of the pool, the slots and the vocabulary
    out_sizes,  # of the verdict: M is L in mode GIVEN
    mode,
    slot,  # [L] int64
    row,  # [L] int64, at which an entry begins
    given,  # [L] int64, -1 but in mode GIVEN
    bad,  # [L] bool, written: a row that was computed is bad
    x,  # [R, V], address
    row_of,  # [M], address, or 0 if row m of the pool is row m of x
    pool_at,  # addresses of `POOL`
    slots_at,  # addresses of `SLOTS`
    verdict_at,  # addresses of `VERDICT`, written; paths in mode PATH
    wide,  # array of the log-probabilities' dtype
    like,  # array of the dtype by which x is read
):
    """Follow the entries, in parallel."""
    work = workspace(sizes.V, wide)
    pool, slots = open_pool(pool_at, sizes), open_slots(slots_at, sizes)
    verdict = open_verdict(verdict_at, out_sizes, wide)
    of_logits = x, row_of, sizes.V, like
    first, last = share(slot.shape[0], part, parts)
    for i in range(first, last):
        at = i if mode == GIVEN else row[i]
        bad[i] = _entry(mode, slot[i], row[i], given[i], at, of_logits, pool, slots, verdict, work)


@loop
def _entry(mode, s, row, given, at, of_logits, pool, slots, verdict, work):
    """Sample an entry's row or path; returns True if a row was bad.

    at: place of its first row in the verdict: the row itself, or its index in mode GIVEN.
    """
    x, row_of, V, like = of_logits
    end_row = pool.slot_start[s] + pool.slot_nodes[s]
    left = slots.max_new[s] - slots.generated[s]
    count = np.int64(0)

    end = broken = False
    while mode != PATH or (row >= 0 and count < left and not end):
        of_model = memory(row_of, pool.token.shape[0], INT)[row] if row_of else row
        logits = memory(x + of_model * V * like.itemsize, V, like)
        likeliest = verdict.top_token[at], verdict.top_prob[at]
        drawn, chance, bad, log_sum = sample_row(
            row, s, given, logits, pool, slots, work, *likeliest
        )
        raw = read(logits[drawn]) - log_sum
        if bad:
            broken, raw = True, type(log_sum)(np.nan)
        verdict.sample[at], verdict.raw_logprob[at] = drawn, raw
        verdict.logprob[at] = raw if slots.temperature[s] == 0 else chance
        if mode != PATH:
            break
        verdict.accept_row[s, count] = row
        count += 1
        for stop in slots.stop_ids[s]:
            # -1 is no token
            end |= drawn >= 0 and drawn == stop
        row = at = child(pool.token, pool.parent, row, end_row, drawn)
    if mode == PATH:
        verdict.accept_count[s] = count
        verdict.finish[s] = STOP if end else LENGTH if count == left else RUNNING
        verdict.bad[s] = broken
    return broken


@loop
def child(token, parent, row, end_row, drawn):
    """Child of `row`, before `end_row`, whose token [M] is `drawn`, or -1."""
    # a parent precedes its children, which have different tokens
    for other in range(row + 1, end_row):
        if parent[other] == row and token[other] == drawn:
            return other
    return -1


@loop
def _begin(out_sizes, verdict_at, wide):
    """Write a verdict without sampled rows; arguments as in `_follow`."""
    out = open_verdict(verdict_at, out_sizes, wide)
    out.sample[:] = -1
    out.logprob[:] = 0
    out.raw_logprob[:] = 0
    out.top_token[:] = -1
    out.top_prob[:] = 0
    out.accept_row[:] = -1
    out.accept_count[:] = 0
    out.finish[:] = RUNNING
    out.bad[:] = False


@by_threads
def _filtered(
    part,
    parts,
    sizes,  # of the slots, a row each, and of the vocabulary
    x,  # [S, V], address
    slots,  # addresses of `SLOTS`
    out,  # [S, V], written
):
    """Write the probabilities of rows after the filters."""
    state, work = open_slots(slots, sizes), workspace(sizes.V, out)
    first, last = share(sizes.S, part, parts)
    for s in range(first, last):
        row = memory(x + s * sizes.V * out.itemsize, sizes.V, out)
        write_filtered(row, s, state, work, out[s])


def _followed(
    mode: int,
    logits: torch.Tensor,
    pool: Pool,
    slots: Slots,
    row: np.ndarray | None = None,
    given: np.ndarray | None = None,
) -> tuple[Verdict, np.ndarray] | None:
    """Verdict of all entries of a mode, and the bad ones' rows; None if the loop cannot read these.

    row, given: [L] int64, in mode GIVEN, whose verdict has L rows.
    """
    logits, wide = in_loops(logits), F64 if logits.dtype == F64 else F32
    of_pool, of_slots = POOL.addresses(pool), SLOTS.addresses(slots)
    if not readable(logits) or of_pool is None or of_slots is None:
        return None
    if mode == PATH:
        slot = np.flatnonzero(pool.slot_nodes.numpy())
        row = pool.slot_start.numpy()[slot].astype(np.int64)
    else:
        row = np.flatnonzero(pool.slot.numpy() >= 0) if row is None else row.astype(np.int64)
        slot = pool.slot.numpy()[row].astype(np.int64)
    M, V, S = pool.rows, logits.shape[1], slots.count
    rows = M if given is None else row.size
    verdict = empty_verdict(rows, S, logits.device, wide)
    out, out_sizes = VERDICT.addresses(verdict, wide), Sizes(M=rows, S=S, A=ACCEPT)
    bad = np.empty(row.size, np.bool_)
    _begin(out_sizes, out, LIKE[wide])
    _follow(
        row.size * V,
        Sizes(M=M, S=S, V=V, words=slots.seen.shape[1]),
        out_sizes,
        mode,
        slot,
        row,
        np.full(row.size, -1) if given is None else given,
        bad,
        logits.data_ptr(),
        0 if pool.texts is None else pool.texts.row.data_ptr(),
        of_pool,
        of_slots,
        out,
        LIKE[wide],
        LIKE[logits.dtype],
    )
    return verdict, row[bad]


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Verdict of `verify_ref`, without rows beside the accepted paths.

    Those have token -1, no likeliest tokens and log-probability 0. The reference runs for dtypes
    and layouts that the loop does not read.
    """
    done = _followed(PATH, logits, pool, slots)
    return verify_ref(logits, pool, slots) if done is None else done[0]


def verify_all(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Verdict of `verify_ref`, of all rows."""
    done = _followed(ROW, logits, pool, slots)
    if done is None:
        return verify_ref(logits, pool, slots)
    out, bad = done[0], torch.from_numpy(done[1])
    out.accept_row, out.accept_count, out.finish = descend_ref(out.sample, pool, slots)
    on = torch.zeros(pool.rows, dtype=torch.bool)
    on[out.accept_row[out.accept_row >= 0].long()] = True
    out.raw_logprob[~on] = 0
    out.logprob[~on & is_greedy(slots, pool.slot.clamp(min=0).long())] = 0
    out.bad[pool.slot[bad[on[bad]]].long()] = True
    return out


def token_logprobs(
    logits: torch.Tensor, pool: Pool, slots: Slots, row: torch.Tensor, token: torch.Tensor
) -> TokenLogprobs:
    """`token_logprobs_ref`, with the bits of `verify`; `bad` is of rows that have a token."""
    done = _followed(GIVEN, logits, pool, slots, row.numpy(), token.numpy().astype(np.int64))
    if done is None:
        return token_logprobs_ref(logits, pool, slots, row, token)
    verdict, bad_rows = done
    bad = torch.zeros(pool.rows, dtype=torch.bool)
    bad[torch.from_numpy(bad_rows)] = True
    return TokenLogprobs(verdict.logprob, verdict.raw_logprob, bad)


def filtered(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """`filtered_ref`; x is float32 or float64."""
    x, of_slots = x.contiguous(), SLOTS.addresses(slots)
    require(readable(x) and of_slots is not None, "filtered", x)
    out = torch.empty_like(x)
    sizes = Sizes(S=x.shape[0], V=x.shape[1], words=slots.seen.shape[1])
    _filtered(x.numel(), sizes, x.data_ptr(), of_slots, out.numpy())
    return out
