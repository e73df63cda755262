"""Verification along the accepted paths in one call: what `verify_on_path` decides of their rows.

A slot's root is sampled, then the row below it that has the token it drew, until there is none or
the sample ends. A row is sampled as the passes sample it (`passes.py`), to the bit. Where it draws
the rest, or its head is too long for the list, the slot waits until the passes have sampled it, and
goes on. Filters, penalties, banned end tokens and bad rows are left to the passes, for all slots.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numba import prange

from csd.cpu.compiled import loop
from csd.cpu.draws import draw_row
from csd.cpu.heads import MOST, PIECE, row_head, row_log_sum, row_peak
from csd.cpu.numbers import LIKE, memory, read, readable
from csd.cpu.passes import PASSES
from csd.cpu.paths import child, ends, finished
from csd.cpu.threads import by_threads
from csd.kernels.verify.on_path import verify_on_path
from csd.kernels.verify.reference_rows import sample_rows
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, RUNNING, TOP, Verdict, empty_verdict

I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
# what the loop reads, in the order of its addresses
POOL = dict(token=I32, parent=I32, depth=I32, slot_start=I32, slot_nodes=I32)
SLOTS = dict(
    key=I64, sample=I32, generated=I32, max_new=I32, min_new=I32, temperature=F64, top_k=I32,
    top_p=F64, min_p=F64, penalty=F64, stop_ids=I32,
)  # fmt: skip
# the fields of a `Verdict`, in the order of their addresses
ROWS = "sample", "logprob", "raw_logprob", "top_token", "top_prob"
PATHS = "accept_row", "accept_count", "finish", "bad"

# where a slot's path is decided, and where the passes have to
DONE, LEFT = -1, -2
# loops are told types by arrays
INT, LONG = np.empty(0, np.int32), np.empty(0, np.int64)
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
BOOL = np.empty(0, np.bool_)


@by_threads
def _follow(
    sizes,  # M, S, V, I
    live,  # [L] slots that have rows
    at,  # [L] the row of each to go on at; written: the row that waits, `DONE` or `LEFT`
    drawn,  # [L] what that row drew, or -1
    chance,  # [L] the log-probability of it
    x,  # [M, V]
    pool,  # addresses of `POOL`
    slots,  # of `SLOTS`
    rows,  # of `ROWS`, [M, ..], written
    paths,  # of `PATHS`, [S, ..], written
    like,
):
    for i in prange(live.shape[0]):
        at[i] = _path(
            live[i], at[i], drawn[i], chance[i], sizes, x, pool, slots, rows, paths, like, chance
        )  # fmt: skip


@loop
def _begin(
    sizes,  # as `_follow`, and so are the others
    live,
    slots,
    rows,
    paths,
    wide,
):
    """A verdict of which no row is sampled; false where a slot needs the passes."""
    for i in range(live.shape[0]):
        if not _is_plain(live[i], sizes, slots):
            return False
    M, S = sizes[:2]
    memory(rows[0], M, INT)[:] = -1
    memory(rows[1], M, wide)[:] = 0
    memory(rows[2], M, wide)[:] = 0
    memory(rows[3], M * TOP, INT)[:] = -1
    memory(rows[4], M * TOP, SINGLE)[:] = 0
    memory(paths[0], S * ACCEPT, INT)[:] = -1
    memory(paths[1], S, INT)[:] = 0
    memory(paths[2], S, INT)[:] = RUNNING
    memory(paths[3], S, BOOL)[:] = False
    return True


@loop
def _is_plain(s, sizes, slots):
    """Whether slot s draws from whole rows as they are."""
    S = sizes[1]
    early = memory(slots[2], S, INT)[s] < memory(slots[4], S, INT)[s]
    if early or memory(slots[9], S, DOUBLE)[s] != 1:
        return False
    top_k, top_p, min_p = memory(slots[6], S, INT), slots[7], memory(slots[8], S, DOUBLE)
    filtered = top_k[s] > 0 or memory(top_p, S, DOUBLE)[s] < 1 or min_p[s] > 0
    return not filtered or memory(slots[5], S, DOUBLE)[s] == 0


@loop
def _path(s, row, drawn, chance, sizes, x, pool, slots, rows, paths, like, wide):
    """Samples the rows of slot s's path from `row` on, which has drawn `drawn` if not -1."""
    M, S, V, I = sizes
    token, parent, depth = memory(pool[0], M, INT), memory(pool[1], M, INT), memory(pool[2], M, INT)
    start, nodes = memory(pool[3], S, INT)[s], memory(pool[4], S, INT)[s]
    key, index = memory(slots[0], S, LONG)[s], memory(slots[1], S, INT)[s]
    generated, max_new = memory(slots[2], S, INT)[s], memory(slots[3], S, INT)[s]
    temperature = memory(slots[5], S, DOUBLE)[s]
    stop_ids = memory(slots[10], (S, I), INT)[s]
    sample, logprob = memory(rows[0], M, INT), memory(rows[1], M, wide)
    raw_logprob = memory(rows[2], M, wide)
    top_token, top_prob = memory(rows[3], (M, TOP), INT), memory(rows[4], (M, TOP), SINGLE)
    accept_row = memory(paths[0], (S, ACCEPT), INT)

    kind, greedy = wide.dtype.type, temperature == 0
    by = kind(1) if greedy else kind(temperature)
    z, top = np.empty(PIECE, wide.dtype), np.empty(TOP, wide.dtype)
    head, score = np.empty(min(MOST, V), np.int64), np.empty(min(MOST, V), wide.dtype)
    accept_count = memory(paths[1], S, INT)
    end, left = False, max_new - generated
    while row >= 0 and accept_count[s] < left and not end:
        logits = memory(x + row * V * like.itemsize, V, like)
        most = row_peak(logits, z)
        if drawn < 0:
            found, rest = row_head(logits, most, by, head, score, z)
            if found > head.shape[0]:
                return row
            drawn, chance, total = draw_row(
                head[:found], score[:found], rest, key, index, generated + depth[row], greedy, True,
                V, top, top_token[row], top_prob[row],
            )  # fmt: skip
            if not np.isfinite(total):
                return LEFT
            if drawn == V:
                return row
        sample[row] = drawn
        raw_logprob[row] = read(logits[drawn]) - row_log_sum(logits, most, z)
        logprob[row] = raw_logprob[row] if greedy else chance
        accept_row[s, accept_count[s]] = row
        accept_count[s] += 1
        end = ends(drawn, stop_ids)
        row, drawn = child(token, parent, row, start + nodes, drawn), np.int64(-1)
    memory(paths[2], S, INT)[s] = finished(end, accept_count[s] == left)
    return DONE


def addresses(record: Any, fields: Mapping[str, torch.dtype]) -> tuple[int, ...] | None:
    """Of a record's tensors; None where one is not laid out as loops read it."""
    tensors = [getattr(record, name) for name in fields]
    for x, dtype in zip(tensors, fields.values(), strict=True):
        if x.dtype is not dtype or not x.is_contiguous():
            return None
    return tuple([x.data_ptr() for x in tensors])


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """`verify_on_path` with the loops' passes."""
    followed = _followed(logits, pool, slots)
    return verify_on_path(logits, pool, slots, PASSES) if followed is None else followed


def _followed(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict | None:
    """None where the paths need the passes."""
    if not readable(logits) or not logits.is_contiguous():
        return None
    of_pool, of_slots = addresses(pool, POOL), addresses(slots, SLOTS)
    if of_pool is None or of_slots is None:
        return None
    (M, V), S = logits.shape, slots.count
    wide = F64 if logits.dtype == F64 else F32
    out = empty_verdict(M, S, logits.device, wide)
    rows, paths = (
        tuple([getattr(out, name).data_ptr() for name in names]) for names in (ROWS, PATHS)
    )
    sizes = M, S, V, slots.stop_ids.shape[1]
    live = np.flatnonzero(pool.slot_nodes.numpy())
    if not _begin(sizes, live, of_slots, rows, paths, LIKE[wide]):
        return None
    at = pool.slot_start.numpy()[live].astype(np.int64)
    drawn, chance = np.full(live.size, -1), np.zeros(live.size, LIKE[wide].dtype)
    while live.size:
        _follow(
            live.size * V, sizes, live, at, drawn, chance, logits.data_ptr(), of_pool, of_slots,
            rows, paths, LIKE[logits.dtype],
        )  # fmt: skip
        if (at == LEFT).any():
            return None
        waits = np.flatnonzero(at >= 0)
        live, at = live[waits], at[waits]
        if live.size:
            row = torch.from_numpy(at)
            found = sample_rows(logits[row], row, pool, slots, PASSES)
            if not found.log_total.isfinite().all():
                return None
            out.top_token[row], out.top_prob[row] = found.top_token.int(), found.top_prob
            drawn, chance = found.token.numpy(), found.logprob.numpy()
    return out
