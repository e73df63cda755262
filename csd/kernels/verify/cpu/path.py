"""Verification along the accepted paths in one call: the samples of `verify_ref`.

A slot's root is sampled, then its child whose token it drew, and so on until there is no such child
or the sample ends; rows beside the path are not read.

The same loop samples every row, or computes log-probabilities of given tokens: see the modes.
"""

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, memory, read, readable, require
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.cpu.heads import in_loops
from csd.kernels.verify.cpu.rows import (
    BOOL,
    DOUBLE,
    F32,
    F64,
    INT,
    SINGLE,
    sample_row,
    workspace,
    write_filtered,
)
from csd.kernels.verify.reference import descend_ref, verify_ref
from csd.kernels.verify.token_logprobs import TokenLogprobs, token_logprobs_ref
from csd.kernels.verify.views import POOL, SLOTS, VERDICT
from csd.state.filters import is_greedy
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, LENGTH, RUNNING, STOP, TOP, Verdict, empty_verdict

# modes: an entry is a slot's path, one row, or one row with a given token
PATH, ROW, GIVEN = 0, 1, 2


@by_threads
def _follow(
    part,
    parts,
    sizes,  # M, S, V, I
    mode,
    slot,  # [L] int64
    row,  # [L] int64, at which an entry begins
    given,  # [L] int64, -1 but in mode GIVEN
    bad,  # [L] bool, written: a row that was computed is bad
    x,  # [R, V]
    row_of,  # [M], address, or 0 if row m of the pool is row m of x
    pool,  # of `POOL`
    slots,  # of `SLOTS`
    verdict,  # of `VERDICT`, written: rows [M, ..], or [L, ..] in mode GIVEN; paths in mode PATH
    wide,  # array of the log-probabilities' dtype
    like,
):
    """Follow the entries, in parallel; x is an address."""
    work = workspace(sizes[2], wide)
    L = slot.shape[0]
    first, last = share(L, part, parts)
    for i in range(first, last):
        places = (i, L) if mode == GIVEN else (row[i], sizes[0])
        of_logits = x, row_of, like
        bad[i] = _entry(
            mode,
            slot[i],
            row[i],
            given[i],
            places,
            sizes,
            of_logits,
            pool,
            slots,
            verdict,
            work,
            wide,
        )


@loop
def _entry(mode, s, row, given, places, sizes, of_logits, pool, slots, verdict, work, wide):
    """Sample an entry's row or path; returns True if a row was bad.

    places: of the entry's first row in the verdict, and the verdict's number of rows.
    """
    M, S, V, I = sizes
    x, row_of, like = of_logits
    at, N = places
    token, parent = memory(pool.token, M, INT), memory(pool.parent, M, INT)
    start, nodes = memory(pool.slot_start, S, INT)[s], memory(pool.slot_nodes, S, INT)[s]
    left = memory(slots.max_new, S, INT)[s] - memory(slots.generated, S, INT)[s]
    greedy = memory(slots.temperature, S, DOUBLE)[s] == 0
    stop_ids = memory(slots.stop_ids, (S, I), INT)[s]
    sample, logprob = memory(verdict.sample, N, INT), memory(verdict.logprob, N, wide)
    raw_logprob = memory(verdict.raw_logprob, N, wide)
    top_token = memory(verdict.top_token, (N, TOP), INT)
    top_prob = memory(verdict.top_prob, (N, TOP), SINGLE)
    accept_row = memory(verdict.accept_row, (S, ACCEPT), INT)
    accept_count = memory(verdict.accept_count, S, INT)

    end = broken = False
    while mode != PATH or (row >= 0 and accept_count[s] < left and not end):
        of_model = memory(row_of, M, INT)[row] if row_of else row
        logits = memory(x + of_model * V * like.itemsize, V, like)
        drawn, chance, bad, log_sum = sample_row(
            row, s, given, logits, sizes, pool, slots, work, wide, top_token[at], top_prob[at]
        )
        raw = read(logits[drawn]) - log_sum
        if bad:
            broken, raw = True, wide.dtype.type(np.nan)
        sample[at], raw_logprob[at], logprob[at] = drawn, raw, raw if greedy else chance
        if mode != PATH:
            break
        accept_row[s, accept_count[s]] = row
        accept_count[s] += 1
        end = ends(drawn, stop_ids)
        row = at = child(token, parent, row, start + nodes, drawn)
    if mode == PATH:
        full = accept_count[s] == left
        memory(verdict.finish, S, INT)[s] = STOP if end else LENGTH if full else RUNNING
        memory(verdict.bad, S, BOOL)[s] = broken
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
    sizes,  # arguments as in `_follow`
    verdict,
    wide,  # array of the log-probabilities' dtype
):
    """Write a verdict without sampled rows."""
    M, S = sizes[:2]
    memory(verdict.sample, M, INT)[:] = -1
    memory(verdict.logprob, M, wide)[:] = 0
    memory(verdict.raw_logprob, M, wide)[:] = 0
    memory(verdict.top_token, M * TOP, INT)[:] = -1
    memory(verdict.top_prob, M * TOP, SINGLE)[:] = 0
    memory(verdict.accept_row, S * ACCEPT, INT)[:] = -1
    memory(verdict.accept_count, S, INT)[:] = 0
    memory(verdict.finish, S, INT)[:] = RUNNING
    memory(verdict.bad, S, BOOL)[:] = False


@by_threads
def _filtered(
    part,
    parts,
    sizes,  # 1, R, V, 0
    x,  # [R, V], address
    slots,  # of `SLOTS`, a row each
    out,  # [R, V], written
):
    """Write the probabilities of rows after the filters."""
    R, V = sizes[1:3]
    work = workspace(V, out)
    first, last = share(R, part, parts)
    for m in range(first, last):
        row = memory(x + m * V * out.itemsize, V, out)
        write_filtered(row, m, sizes, slots, work, out[m])


class Case:
    """Arguments of the loop for rows of logits, and the verdict that it writes.

    rows: rows of the verdict, by default those of the pool.
    """

    def __init__(self, logits: torch.Tensor, pool: Pool, slots: Slots, rows: int | None = None):
        self.logits, self.pool, self.slots = in_loops(logits), pool, slots
        M, V, S = pool.rows, logits.shape[1], slots.count
        self.wide = F64 if logits.dtype == F64 else F32
        self.verdict = empty_verdict(M if rows is None else rows, S, logits.device, self.wide)
        self.sizes = M, S, V, slots.stop_ids.shape[1]
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
            row.size * self.sizes[2],
            self.sizes,
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
        _begin(self.sizes, self._out, LIKE[self.wide])
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
    _filtered(x.numel(), (1, *x.shape, 0), x.data_ptr(), of_slots, out.numpy())
    return out
