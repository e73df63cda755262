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
        end = ends(drawn, slots.stop_ids[s])
        row = at = child(pool.token, pool.parent, row, end_row, drawn)
    if mode == PATH:
        verdict.accept_count[s] = count
        verdict.finish[s] = STOP if end else LENGTH if count == left else RUNNING
        verdict.bad[s] = broken
    return broken


@loop
def child(
    token,  # [M]
    parent,  # [M]
    row,
    end_row,  # the row after the slot's last one
    drawn,
):
    """Child of `row` whose token is `drawn`, or -1."""
    # a parent precedes its children, which have different tokens
    for other in range(row + 1, end_row):
        if parent[other] == row and token[other] == drawn:
            return other
    return -1


@loop
def ends(drawn, stop_ids):
    """True if the token `drawn` is one of `stop_ids`; -1 is no token."""
    is_end = False
    for i in range(stop_ids.shape[0]):
        is_end |= drawn >= 0 and drawn == stop_ids[i]
    return is_end


@loop
def _begin(
    out_sizes,  # arguments as in `_follow`
    verdict,
    wide,
):
    """Write a verdict without sampled rows."""
    out = open_verdict(verdict, out_sizes, wide)
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


class Case:
    """Arguments of the loop for rows of logits, and the verdict that it writes.

    rows: rows of the verdict, by default those of the pool.
    """

    def __init__(self, logits: torch.Tensor, pool: Pool, slots: Slots, rows: int | None = None):
        self.logits, self.pool, self.slots = in_loops(logits), pool, slots
        M, V, S = pool.rows, logits.shape[1], slots.count
        self.wide = F64 if logits.dtype == F64 else F32
        rows = M if rows is None else rows
        self.verdict = empty_verdict(rows, S, logits.device, self.wide)
        self.sizes = Sizes(M=M, S=S, V=V, words=slots.seen.shape[1])
        self.out_sizes = Sizes(M=rows, S=S, A=ACCEPT)
        self._of_pool, self._of_slots = POOL.addresses(pool), SLOTS.addresses(slots)
        self._out = VERDICT.addresses(self.verdict, self.wide)

    @property
    def is_readable(self) -> bool:
        """False if the loop does not read these tensors."""
        return readable(self.logits) and None not in (self._of_pool, self._of_slots)

    def follow(
        self, mode: int, slot: np.ndarray, row: np.ndarray, given: np.ndarray | None = None
    ) -> np.ndarray:
        """Write the verdict of rows [L] of slots [L]; returns [L] bool: bad ones."""
        slot, row = slot.astype(np.int64), row.astype(np.int64)
        bad = np.empty(row.size, np.bool_)
        _follow(
            row.size * self.sizes.V,
            self.sizes,
            self.out_sizes,
            mode,
            slot,
            row,
            np.full(row.size, -1) if given is None else given,
            bad,
            self.logits.data_ptr(),
            0 if self.pool.texts is None else self.pool.texts.row.data_ptr(),
            self._of_pool,
            self._of_slots,
            self._out,
            LIKE[self.wide],
            LIKE[self.logits.dtype],
        )
        return bad

    def sample(self, mode: int, slot: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Write the verdict of all rows by `follow`, in mode PATH or ROW."""
        _begin(self.out_sizes, self._out, LIKE[self.wide])
        return self.follow(mode, slot, row)


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Verdict of `verify_ref`, without rows beside the accepted paths.

    Those have token -1, no likeliest tokens and log-probability 0. The reference runs for dtypes
    and layouts that the loop does not read.
    """
    case = Case(logits, pool, slots)
    if not case.is_readable:
        return verify_ref(logits, pool, slots)
    live = np.flatnonzero(pool.slot_nodes.numpy())
    case.sample(PATH, live, pool.slot_start.numpy()[live])
    return case.verdict


def verify_all(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Verdict of `verify_ref`, of all rows."""
    case = Case(logits, pool, slots)
    if not case.is_readable:
        return verify_ref(logits, pool, slots)
    row = np.flatnonzero(pool.slot.numpy() >= 0)
    bad = torch.from_numpy(row[case.sample(ROW, pool.slot.numpy()[row], row)])
    out = case.verdict
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
    case = Case(logits, pool, slots, len(row))
    if not case.is_readable:
        return token_logprobs_ref(logits, pool, slots, row, token)
    slot, at = pool.slot[row].numpy(), row.numpy()
    broken = case.follow(GIVEN, slot, at, token.numpy().astype(np.int64))
    bad = torch.zeros(pool.rows, dtype=torch.bool)
    bad[row[torch.from_numpy(broken)]] = True
    return TokenLogprobs(case.verdict.logprob, case.verdict.raw_logprob, bad)


def filtered(x: torch.Tensor, slots: Slots) -> torch.Tensor:
    """`filtered_ref`; x is float32 or float64."""
    x, of_slots = x.contiguous(), SLOTS.addresses(slots)
    require(readable(x) and of_slots is not None, "filtered", x)
    out = torch.empty_like(x)
    sizes = Sizes(S=x.shape[0], V=x.shape[1], words=slots.seen.shape[1])
    _filtered(x.numel(), sizes, x.data_ptr(), of_slots, out.numpy())
    return out
