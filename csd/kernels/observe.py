"""What a step has shown, as rows that `graph_insert` takes: M of the pool, and one more a slot.

Row r of slot s, with the target's top 8 tokens t_u of probability p_u and the drawn token x:

    top_u     = round(p_u * soft),         halves to even
    hard      = what the drawn token weighs: 0 where the slot's accepted path leaves row r out, else
                `hard`, or `soft` where no top_u is above 0, as in recordings
    weight_u  = top_u + hard * [t_u = x],  token t_u
    weight_8  = hard * [x is none of t],   token x
    total     = hard + soft * [some top_u > 0]

after the row's own context. Row M + s tells the group as a whole, after anything, the first 9
tokens on the slot's path, WEIGHT_ONE each; where more than TELLERS slots of a group have a path
they take turns, since merging many updates into one context takes the square of their number. A row
of total 0 has key -1 and is not entered.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton

from csd.graph.table import ANY, SOURCES, WEIGHT_ONE, GraphConfig
from csd.kernels.aot import Job, Shape
from csd.kernels.checks import check_fields
from csd.kernels.observe_kernel import _observe_kernel
from csd.pool import MAX_DEPTH, Pool
from csd.slots import Slots
from csd.verdict import TOP, Verdict

# successors of a row: the target's top 8 and what was drawn
SAID = TOP + 1
# slots that tell their group as a whole in one step
TELLERS = 16
BLOCK_R, BLOCK_S = 4, 64


class Observed(NamedTuple):
    """R rows with U = 9 successors each, after contexts of N tokens."""

    group_key: torch.Tensor  # [R] int64, -1: nothing to enter
    context: torch.Tensor  # [R, N] int32, latest first
    succ_token: torch.Tensor  # [R, U] int32
    succ_weight: torch.Tensor  # [R, U] int32, 0 is none
    row_total: torch.Tensor  # [R] int32
    source_bit: torch.Tensor  # [R] int32, the sample's


def any_context(rows: int, N: int, device: str | torch.device) -> torch.Tensor:
    """[rows, N] int32, the context of what a group says after anything."""
    context = torch.full((rows, N), -1, dtype=torch.int32, device=device)
    context[:, 0] = ANY
    return context


def observe_ref(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """Plain PyTorch."""
    M, S, device = pool.rows, slots.count, pool.slot.device
    s = pool.slot.clamp(min=0)
    # the slot of each row, then the slots themselves
    owner = torch.cat([s, torch.arange(S, dtype=s.dtype, device=device)])
    key = slots.group_key[slots.group.clamp(min=0)[owner]]
    # float64 holds the product exactly: one rounding, the same everywhere
    top = (verdict.top_prob.double() * config.soft_weight).round().int()
    known = top.any(1)
    # a row is kept when its slot's path has it at its depth
    row = torch.arange(M, device=device)
    kept = verdict.accept_row[s, pool.depth] == row
    hard = torch.where(known, config.hard_weight, config.soft_weight) * kept
    drawn = (verdict.top_token == verdict.sample[:, None]) * hard[:, None]
    ninth = hard - drawn.sum(1)
    said = verdict.accept_row[:, :SAID]
    # [S, S]: slots of the same group that have a path
    mates = (slots.group[:, None] == slots.group) & (said[:, 0] >= 0)
    turns = (mates.sum(1) + TELLERS - 1).div(TELLERS, rounding_mode="floor").clamp(1)
    turn = (slots.step + mates.tril(-1).sum(1)) % turns
    told = (said >= 0) & (turn == 0)[:, None]
    weight = torch.cat(
        [torch.cat([top + drawn, ninth[:, None]], 1), told * WEIGHT_ONE]
    ).int()
    token = torch.cat([verdict.top_token, verdict.sample[:, None]], 1)
    total = torch.cat([hard + known * config.soft_weight, weight[M:].sum(1)]).int()
    return Observed(
        group_key=torch.where(total > 0, key, -1),
        context=torch.cat([pool.context, any_context(S, pool.context.shape[1], device)]),
        succ_token=torch.cat([token, verdict.sample[said.clamp(min=0)]]),
        succ_weight=weight,
        row_total=total,
        source_bit=(slots.sample % SOURCES)[owner],
    )


def _empty(M: int, S: int, N: int, device: torch.device) -> Observed:
    R = M + S

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    key = torch.empty(R, dtype=torch.int64, device=device)
    return Observed(key, ints(R, N), ints(R, SAID), ints(R, SAID), ints(R), ints(R))


def observe_triton(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """One launch."""
    M, N = pool.context.shape
    out = _empty(M, slots.count, N, pool.context.device)
    _observe_kernel[(triton.cdiv(M + slots.count, BLOCK_R),)](
        slot_ptr=pool.slot,
        depth_ptr=pool.depth,
        context_ptr=pool.context.contiguous(),
        group_ptr=slots.group,
        sample_index_ptr=slots.sample,
        group_key_ptr=slots.group_key,
        step_ptr=slots.step,
        sample_ptr=verdict.sample,
        top_token_ptr=verdict.top_token.contiguous(),
        top_prob_ptr=verdict.top_prob.contiguous(),
        accept_row_ptr=verdict.accept_row.contiguous(),
        out_key_ptr=out.group_key,
        out_context_ptr=out.context,
        out_token_ptr=out.succ_token,
        out_weight_ptr=out.succ_weight,
        out_total_ptr=out.row_total,
        out_bit_ptr=out.source_bit,
        rows=M,
        slots=slots.count,
        SOFT=config.soft_weight,
        HARD=config.hard_weight,
        ONE=WEIGHT_ONE,
        ANY=ANY,
        SOURCES=SOURCES,
        TELLERS=TELLERS,
        A=verdict.accept_row.shape[1],
        N=N,
        BLOCK_N=triton.next_power_of_2(N),
        TOP=TOP,
        BLOCK_U=triton.next_power_of_2(SAID),
        BLOCK_R=BLOCK_R,
        BLOCK_S=BLOCK_S,
        num_warps=1,
    )
    return out


_POOL = ("slot", "depth", "context")
_SLOTS = ("group", "sample", "group_key", "step")
_VERDICT = ("sample", "top_token", "top_prob", "accept_row")


@torch.library.custom_op("csd::observe", mutates_args=(), device_types="cpu")
def _observe(
    pool: list[torch.Tensor],
    slots: list[torch.Tensor],
    verdict: list[torch.Tensor],
    soft_weight: int,
    hard_weight: int,
) -> list[torch.Tensor]:
    return _run(observe_ref, pool, slots, verdict, soft_weight, hard_weight)


@_observe.register_kernel("cuda")
def _(pool: list[torch.Tensor], *args: Any) -> Any:
    with torch.cuda.device_of(pool[0]):
        return _run(observe_triton, pool, *args)


@_observe.register_fake
def _(pool: list[torch.Tensor], slots: list[torch.Tensor], *args: Any) -> Any:
    (M, N), device = pool[2].shape, pool[2].device
    return list(_empty(M, slots[0].shape[0], N, device))


def _run(
    run: Callable,
    pool: list[torch.Tensor],
    slots: list[torch.Tensor],
    verdict: list[torch.Tensor],
    soft_weight: int,
    hard_weight: int,
) -> list[torch.Tensor]:
    nodes, state, decided = (
        SimpleNamespace(**dict(zip(names, tensors, strict=True)))
        for names, tensors in ((_POOL, pool), (_SLOTS, slots), (_VERDICT, verdict))
    )
    nodes.rows, state.count = pool[0].shape[0], slots[0].shape[0]
    weights = SimpleNamespace(soft_weight=soft_weight, hard_weight=hard_weight)
    return list(run(nodes, state, decided, weights))


def observe(pool: Pool, slots: Slots, verdict: Verdict, config: GraphConfig) -> Observed:
    """What the step that gave `verdict` over `pool` has shown, before the slots move on."""
    A = max(verdict.accept_row.shape[-1], SAID)
    sizes, device = {"M": pool.rows, "S": slots.count, "A": A}, pool.slot.device
    check_fields("pool", pool, _POOL, sizes, device)
    check_fields("slots", slots, _SLOTS, sizes, device)
    check_fields("verdict", verdict, _VERDICT, sizes, device)
    lists = (
        [getattr(x, name) for name in names]
        for x, names in ((pool, _POOL), (slots, _SLOTS), (verdict, _VERDICT))
    )
    return Observed(*_observe(*lists, config.soft_weight, config.hard_weight))


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    return [_job(GraphConfig()), _job(GraphConfig(orders=(1, 2, 4)))]


def _job(config: GraphConfig) -> Job:
    N = config.context
    types = {"group_key": "*i64:16", "out_key": "*i64:16", "top_prob": "*fp32:16"}
    types |= {"rows": "i32", "slots": "i32"}
    constants = dict(
        SOFT=config.soft_weight, HARD=config.hard_weight, ONE=WEIGHT_ONE, ANY=ANY,
        SOURCES=SOURCES, TELLERS=TELLERS, A=MAX_DEPTH + 1, N=N, BLOCK_N=N, TOP=TOP,
        BLOCK_U=triton.next_power_of_2(SAID), BLOCK_R=BLOCK_R, BLOCK_S=BLOCK_S,
    )  # fmt: skip
    args = {}
    for param in _observe_kernel.params:
        name = param.name.removesuffix("_ptr")
        args[param.name] = constants[name] if param.is_constexpr else types.get(name, "*i32:16")
    return Job(name=f"observe N={N}", kernel=_observe_kernel, args=args, num_warps=1)
