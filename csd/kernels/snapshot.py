"""What the host learns of a step, gathered into two tensors that one copy each takes to it.

Of the accepted path of slot s, rows a_0 .. a_{n-1} (the root first), in order:

    tokens, logprobs, raw_logprobs [S, A]   of row a_i; of row 0 behind the path
    sources [S, A]                          of row a_{i+1}, which drafted token i; 0 for the last
    cost [M]                                of drafted rows, -1 of roots and padding

beside counts, rows, finish and bad of every slot [S]; with `top` the target's top 8 [S, A, 8] at
the path's rows; with `trees` the pool's trees and all accepted rows. `layout` says where each lies.
"""

from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import triton

from csd.kernels.aot import Job, Shape
from csd.kernels.checks import check_fields
from csd.kernels.snapshot_kernel import _snapshot_kernel
from csd.pool import MAX_DEPTH, Pool
from csd.verdict import TOP, Verdict

# rows of the pool that one program takes
BLOCK_R = 64

# name, shape and first element of a field
Places = tuple[tuple[str, tuple[int, ...], int], ...]


def layout(S: int, M: int, A: int, top: bool, trees: bool) -> tuple[Places, Places]:
    """Fields of the integers and of the floats, of S slots, M rows and paths of A rows at most."""
    ints: dict[str, tuple[int, ...]] = {name: (S,) for name in ("count", "nodes", "finish", "bad")}
    ints |= {"tokens": (S, A), "sources": (S, A), "cost": (M,)}
    floats: dict[str, tuple[int, ...]] = {"logprobs": (S, A), "raw_logprobs": (S, A)}
    if top:
        ints["top_token"] = floats["top_prob"] = (S, A, TOP)
    if trees:
        ints["start"] = (S,)
        ints |= {name: (M,) for name in ("token", "parent", "path_cost", "source")}
        ints["accept_row"] = (S, A)
    return _places(ints), _places(floats)


def _places(shapes: dict[str, tuple[int, ...]]) -> Places:
    at, places = 0, []
    for name, shape in shapes.items():
        places.append((name, shape, at))
        at += prod(shape)
    return tuple(places)


def snapshot_ref(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch. Returns int32 and floats, in the dtype of the log-probabilities."""
    row = verdict.accept_row.clamp(min=0).long()
    # token i of the path was drafted as row i + 1; the last one was sampled off the tree
    following = torch.nn.functional.pad(row[:, 1:], (0, 1))
    place = torch.arange(row.shape[1], device=row.device)
    drafted = place + 1 < verdict.accept_count[:, None]
    ints = [
        verdict.accept_count, pool.slot_nodes, verdict.finish, verdict.bad, verdict.sample[row],
        torch.where(drafted, pool.source[following], 0),
        torch.where(pool.depth > 0, pool.cost, -1),
    ]  # fmt: skip
    floats = [verdict.logprob[row], verdict.raw_logprob[row]]
    if top:
        ints.append(verdict.top_token[row])
        floats.append(verdict.top_prob[row].to(verdict.logprob.dtype))
    if trees:
        ints += [
            pool.slot_start, pool.token, pool.parent, pool.cost, pool.source, verdict.accept_row,
        ]  # fmt: skip
    return (
        torch.cat([x.reshape(-1).int() for x in ints]),
        torch.cat([x.reshape(-1) for x in floats]),
    )


def snapshot_triton(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    (S, A), M = verdict.accept_row.shape, pool.token.shape[0]
    ints, floats = _empty(S, M, A, top, trees, verdict.logprob)
    _snapshot_kernel[(max(S, triton.cdiv(M, BLOCK_R)),)](
        slot_start_ptr=pool.slot_start,
        slot_nodes_ptr=pool.slot_nodes,
        depth_ptr=pool.depth,
        cost_ptr=pool.cost,
        source_ptr=pool.source,
        token_ptr=pool.token,
        parent_ptr=pool.parent,
        sample_ptr=verdict.sample,
        logprob_ptr=verdict.logprob,
        raw_logprob_ptr=verdict.raw_logprob,
        top_token_ptr=verdict.top_token,
        top_prob_ptr=verdict.top_prob,
        accept_row_ptr=verdict.accept_row,
        accept_count_ptr=verdict.accept_count,
        finish_ptr=verdict.finish,
        bad_ptr=verdict.bad,
        ints_ptr=ints,
        floats_ptr=floats,
        S=S,
        M=M,
        A=A,
        BLOCK_A=triton.next_power_of_2(A),
        TOP=TOP,
        HAS_TOP=top,
        HAS_TREES=trees,
        BLOCK_R=BLOCK_R,
        num_warps=1,
    )
    return ints, floats


def _empty(
    S: int, M: int, A: int, top: bool, trees: bool, logprob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ends = (places[-1] for places in layout(S, M, A, top, trees))
    ints, floats = (at + prod(shape) for _, shape, at in ends)
    return logprob.new_empty(ints, dtype=torch.int32), logprob.new_empty(floats)


_POOL = ("slot_start", "slot_nodes", "depth", "cost", "source", "token", "parent")
_VERDICT = (
    "sample", "logprob", "raw_logprob", "top_token", "top_prob", "accept_row", "accept_count",
    "finish", "bad",
)  # fmt: skip


@torch.library.custom_op("csd::snapshot", mutates_args=(), device_types="cpu")
def _snapshot(
    pool: list[torch.Tensor], verdict: list[torch.Tensor], top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    nodes, decided = _records(pool, verdict)
    return snapshot_ref(nodes, decided, top, trees)


@_snapshot.register_kernel("cuda")
def _(pool: list[torch.Tensor], verdict: list[torch.Tensor], top: bool, trees: bool) -> Any:
    with torch.cuda.device_of(pool[0]):
        nodes, decided = _records(pool, verdict)
        return snapshot_triton(nodes, decided, top, trees)


@_snapshot.register_fake
def _(pool: list[torch.Tensor], verdict: list[torch.Tensor], top: bool, trees: bool) -> Any:
    nodes, decided = _records(pool, verdict)
    S, A = decided.accept_row.shape
    return _empty(S, nodes.token.shape[0], A, top, trees, decided.logprob)


def _records(pool: list[torch.Tensor], verdict: list[torch.Tensor]) -> list[Any]:
    return [
        SimpleNamespace(**dict(zip(names, tensors, strict=True)))
        for names, tensors in ((_POOL, pool), (_VERDICT, verdict))
    ]


def snapshot(
    pool: Pool, verdict: Verdict, top: bool = False, trees: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step decided, as int32 and as floats; `layout` says where what lies.

    top: with the top 8 of the path's tokens. trees: with what was drafted.
    """
    sizes, device = {"M": pool.token.shape[-1]}, verdict.sample.device
    check_fields("verdict", verdict, _VERDICT, sizes, device)
    check_fields("pool", pool, _POOL, sizes, device)
    lists = ([getattr(x, n) for n in names] for x, names in ((pool, _POOL), (verdict, _VERDICT)))
    return _snapshot(*lists, top, trees)


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    types = {"bad": "*u1:16", "S": "i32", "M": "i32"}
    types |= {name: "*fp32:16" for name in ("logprob", "raw_logprob", "top_prob", "floats")}
    A = MAX_DEPTH + 1
    constants = dict(
        A=A, BLOCK_A=triton.next_power_of_2(A), TOP=TOP, HAS_TOP=False, HAS_TREES=False,
        BLOCK_R=BLOCK_R,
    )  # fmt: skip
    args = {}
    for param in _snapshot_kernel.params:
        name = param.name.removesuffix("_ptr")
        args[param.name] = constants[name] if param.is_constexpr else types.get(name, "*i32:16")
    return [Job(name="snapshot", kernel=_snapshot_kernel, args=args, num_warps=1)]
