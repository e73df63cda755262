"""Verification along the accepted paths in one call; the reference is `verify_on_path`.

A slot's root is sampled, then its child whose token it drew, and so on until there is no such child
or the sample ends. A row's sample equals that of the passes (`PASSES`) to the bit. If a
row draws the rest, or its head is too long for the list, its slot waits until the passes have
sampled the row, and then continues. If any slot has filters, penalties, banned end tokens or bad
rows, the passes verify all slots. `descend` follows the accepted paths of all slots in one call, as
`descend_ref`; the other passes are in `heads.py` and `draws.py`.
"""

from collections import namedtuple

import numpy as np
import torch

from csd.kernels.numba.jit import loop
from csd.kernels.numba.tensors import LIKE, addresses, memory, read, readable
from csd.kernels.numba.threads import by_threads, share
from csd.kernels.verify.cpu.draws import draw, draw_row
from csd.kernels.verify.cpu.heads import (
    MAX_HEAD,
    PIECE,
    heads,
    log_sum,
    row_head,
    row_log_sum,
    row_peak,
)
from csd.kernels.verify.passes import Passes, Paths
from csd.kernels.verify.reference import verify_on_path
from csd.kernels.verify.reference_rows import sample_rows
from csd.state.filters import CUTS, dtype_of
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.state.verdict import ACCEPT, LENGTH, RUNNING, STOP, TOP, Verdict, empty_verdict


@loop
def _descend(
    sample,  # [M]
    token,  # [M]
    parent,  # [M]
    slot_start,  # [S]
    slot_nodes,  # [S]
    stop_ids,  # [S, I]
    max_new,  # [S]
    generated,  # [S]
    accept_row,  # [S, A], written
    accept_count,  # [S], written
    finish,  # [S], written
):
    """Write the accepted path of each slot and its state."""
    for s in range(slot_start.shape[0]):
        accept_row[s] = -1
        left, end_row = max_new[s] - generated[s], slot_start[s] + slot_nodes[s]
        row, count, end = slot_start[s] if slot_nodes[s] else -1, 0, False
        while row >= 0 and count < left and not end:
            accept_row[s, count] = row
            count += 1
            end = ends(sample[row], stop_ids[s])
            row = child(token, parent, row, end_row, sample[row])
        accept_count[s] = count
        finish[s] = finished(end, count == left) if slot_nodes[s] else RUNNING


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
def finished(end, full):
    """State of a slot: STOP at an end token, LENGTH at its last token, else RUNNING."""
    return STOP if end else LENGTH if full else RUNNING


def descend(sample: torch.Tensor, pool: Pool, slots: Slots) -> Paths:
    """Accepted rows [S, A], their numbers [S] and the slots' states [S], as `descend_ref`."""
    S = slots.count
    shapes = (S, ACCEPT), (S,), (S,)
    out = tuple(torch.empty(shape, dtype=torch.int32) for shape in shapes)
    arrays = (
        sample,
        pool.token,
        pool.parent,
        pool.slot_start,
        pool.slot_nodes,
        slots.stop_ids,
        slots.max_new,
        slots.generated,
    )
    _descend(*(x.contiguous().numpy() for x in (*arrays, *out)))
    return out


PASSES = Passes(heads, log_sum, draw, descend)


I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
# fields that the loop reads, with their dtypes, and fields of the verdict that it writes
POOL = dict(token=I32, parent=I32, depth=I32, slot_start=I32, slot_nodes=I32)
SLOTS = dict(
    key=I64,
    sample=I32,
    generated=I32,
    max_new=I32,
    min_new=I32,
    temperature=F64,
    repetition_penalty=F64,
    stop_ids=I32,
)
# index of the first filter that drops tokens, and the values of these filters that turn them off:
# of whole numbers, then of others
FIRST = len(SLOTS)
WHOLE = {name: off for name, off in CUTS.items() if dtype_of(name) == I32}
OTHER = {name: off for name, off in CUTS.items() if dtype_of(name) == F64}
SLOTS |= dict.fromkeys(WHOLE, I32) | dict.fromkeys(OTHER, F64)
WHOLE_OFF, OTHER_OFF = tuple(WHOLE.values()), tuple(OTHER.values())
PoolAddresses, SlotAddresses = namedtuple("PoolAddresses", POOL), namedtuple("SlotAddresses", SLOTS)
RowAddresses = namedtuple("RowAddresses", "sample logprob raw_logprob top_token top_prob")
PathAddresses = namedtuple("PathAddresses", "accept_row accept_count finish bad")

# values of `resume`: the slot's path is complete, or the passes must verify all slots
DONE, LEFT = -1, -2
# empty arrays of the dtypes in which loops read memory
INT, LONG = np.empty(0, np.int32), np.empty(0, np.int64)
SINGLE, DOUBLE = np.empty(0, np.float32), np.empty(0, np.float64)
BOOL = np.empty(0, np.bool_)


@by_threads
def _follow(
    part,
    parts,
    sizes,  # M, S, V, I
    live,  # [L] slots that have rows
    resume,  # [L] the row at which each slot continues; written: the row that waits, `DONE`, `LEFT`
    drawn,  # [L] the token that this row drew, or -1
    chance,  # [L] that token's log-probability
    x,  # [M, V]
    pool,  # `PoolAddresses`
    slots,  # `SlotAddresses`
    rows,  # `RowAddresses`, [M, ..], written
    paths,  # `PathAddresses`, [S, ..], written
    like,
):
    """Follow each live slot's path, slots in parallel; x is an address."""
    first, last = share(live.shape[0], part, parts)
    for i in range(first, last):
        resume[i] = _path(
            live[i],
            resume[i],
            drawn[i],
            chance[i],
            sizes,
            x,
            pool,
            slots,
            rows,
            paths,
            like,
            chance,
        )


@loop
def _begin(
    sizes,  # arguments as in `_follow`
    live,
    slots,
    rows,
    paths,
    wide,  # array of the log-probabilities' dtype
):
    """Write a verdict without sampled rows; returns False if a slot needs the passes."""
    for i in range(live.shape[0]):
        if not _is_plain(live[i], sizes, slots):
            return False
    M, S = sizes[:2]
    memory(rows.sample, M, INT)[:] = -1
    memory(rows.logprob, M, wide)[:] = 0
    memory(rows.raw_logprob, M, wide)[:] = 0
    memory(rows.top_token, M * TOP, INT)[:] = -1
    memory(rows.top_prob, M * TOP, SINGLE)[:] = 0
    memory(paths.accept_row, S * ACCEPT, INT)[:] = -1
    memory(paths.accept_count, S, INT)[:] = 0
    memory(paths.finish, S, INT)[:] = RUNNING
    memory(paths.bad, S, BOOL)[:] = False
    return True


@loop
def _is_plain(s, sizes, slots):
    """True if slot s samples unchanged logits: no filter, penalty or banned end token applies."""
    S = sizes[1]
    early = memory(slots.generated, S, INT)[s] < memory(slots.min_new, S, INT)[s]
    if early or memory(slots.repetition_penalty, S, DOUBLE)[s] != 1:
        return False
    filtered = False
    for i in range(len(WHOLE_OFF)):
        filtered |= memory(slots[FIRST + i], S, INT)[s] != WHOLE_OFF[i]
    for i in range(len(OTHER_OFF)):
        filtered |= memory(slots[FIRST + len(WHOLE_OFF) + i], S, DOUBLE)[s] != OTHER_OFF[i]
    return not filtered or memory(slots.temperature, S, DOUBLE)[s] == 0


@loop
def _path(s, row, drawn, chance, sizes, x, pool, slots, rows, paths, like, wide):
    """Samples slot s's path from `row` on; drawn: the token that this row drew, or -1.

    Returns `DONE`, `LEFT`, or the row at which the slot waits for the passes.
    """
    M, S, V, I = sizes
    token, parent = memory(pool.token, M, INT), memory(pool.parent, M, INT)
    depth = memory(pool.depth, M, INT)
    start, nodes = memory(pool.slot_start, S, INT)[s], memory(pool.slot_nodes, S, INT)[s]
    key, index = memory(slots.key, S, LONG)[s], memory(slots.sample, S, INT)[s]
    generated, max_new = memory(slots.generated, S, INT)[s], memory(slots.max_new, S, INT)[s]
    temperature = memory(slots.temperature, S, DOUBLE)[s]
    stop_ids = memory(slots.stop_ids, (S, I), INT)[s]
    sample, logprob = memory(rows.sample, M, INT), memory(rows.logprob, M, wide)
    raw_logprob = memory(rows.raw_logprob, M, wide)
    top_token = memory(rows.top_token, (M, TOP), INT)
    top_prob = memory(rows.top_prob, (M, TOP), SINGLE)
    accept_row = memory(paths.accept_row, (S, ACCEPT), INT)

    kind, greedy = wide.dtype.type, temperature == 0
    divisor = kind(1) if greedy else kind(temperature)
    z, top = np.empty(PIECE, wide.dtype), np.empty(TOP, wide.dtype)
    head, score = np.empty(min(MAX_HEAD, V), np.int64), np.empty(min(MAX_HEAD, V), wide.dtype)
    accept_count = memory(paths.accept_count, S, INT)
    end, left = False, max_new - generated
    while row >= 0 and accept_count[s] < left and not end:
        logits = memory(x + row * V * like.itemsize, V, like)
        peak = row_peak(logits, z)
        if drawn < 0:
            count, rest = row_head(logits, peak, divisor, head, score, z)
            if count > head.shape[0]:
                return row
            drawn, chance, total = draw_row(
                head[:count],
                score[:count],
                rest,
                key,
                index,
                generated + depth[row],
                greedy,
                True,
                V,
                top,
                top_token[row],
                top_prob[row],
            )
            if not np.isfinite(total):
                return LEFT
            if drawn == V:
                return row
        sample[row] = drawn
        raw_logprob[row] = read(logits[drawn]) - row_log_sum(logits, peak, z)
        logprob[row] = raw_logprob[row] if greedy else chance
        accept_row[s, accept_count[s]] = row
        accept_count[s] += 1
        end = ends(drawn, stop_ids)
        row, drawn = child(token, parent, row, start + nodes, drawn), np.int64(-1)
    memory(paths.finish, S, INT)[s] = finished(end, accept_count[s] == left)
    return DONE


def verify(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict:
    """Verdict of the accepted paths, by the loop or else by `verify_on_path` with its passes."""
    followed = _followed(logits, pool, slots)
    return verify_on_path(logits, pool, slots, PASSES) if followed is None else followed


def _followed(logits: torch.Tensor, pool: Pool, slots: Slots) -> Verdict | None:
    """Verdict by the loop; None if it does not read the tensors, or a slot needs the passes."""
    if not readable(logits) or not logits.is_contiguous():
        return None
    of_pool = addresses(PoolAddresses, pool, POOL)
    of_slots = addresses(SlotAddresses, slots, SLOTS)
    if of_pool is None or of_slots is None:
        return None
    (M, V), S = logits.shape, slots.count
    wide = F64 if logits.dtype == F64 else F32
    out = empty_verdict(M, S, logits.device, wide)
    rows, paths = (
        kind(*[getattr(out, name).data_ptr() for name in kind._fields])
        for kind in (RowAddresses, PathAddresses)
    )
    sizes = M, S, V, slots.stop_ids.shape[1]
    live = np.flatnonzero(pool.slot_nodes.numpy())
    if not _begin(sizes, live, of_slots, rows, paths, LIKE[wide]):
        return None
    resume = pool.slot_start.numpy()[live].astype(np.int64)
    drawn, chance = np.full(live.size, -1), np.zeros(live.size, LIKE[wide].dtype)
    while live.size:
        _follow(
            live.size * V,
            sizes,
            live,
            resume,
            drawn,
            chance,
            logits.data_ptr(),
            of_pool,
            of_slots,
            rows,
            paths,
            LIKE[logits.dtype],
        )
        if (resume == LEFT).any():
            return None
        waits = np.flatnonzero(resume >= 0)
        live, resume = live[waits], resume[waits]
        if live.size:
            row = torch.from_numpy(resume)
            samples = sample_rows(logits[row], row, pool, slots, PASSES)
            if not samples.log_total.isfinite().all():
                return None
            out.top_token[row], out.top_prob[row] = samples.top_token.int(), samples.top_prob
            drawn, chance = samples.token.numpy(), samples.logprob.numpy()
    return out
