"""Attention of every pool row over its prompt, its slot's committed tokens and its tree.

    P(m) = the prompt tokens of row m's group             prompt_pages, prompt_len
    C(m) = the committed tokens of row m's slot           slot_pages, slot_len
    N(m) = the nodes j of its slot with bit j of ancestors[m] set     pool row slot_start + j
    out[m, h] = sum of softmax(scale * q[m, h] . k[t, h // (H / K)]) v[t, h // (H / K)]
                over t in P(m), C(m) and N(m) together

Rows are ordered by group, then slot; rows of no slot give zeros. The mask is the ancestor word,
and it is looked at for nodes only.

Two launches. The first walks the step's work list (`attention_plan`): a segment is a tile of rows
that share keys, packed with the query heads of a key-value head into one matrix product, and a run
of those keys. A prompt's tiles hold rows of all its samples. Scores are in base 2 (scale times
log2 e); a segment leaves a normalised partial result o and its lse = log2(sum of 2^score). The
second launch adds them up for each row: sum of 2^(lse - max lse) o over the sum of the weights.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from csd.kernels.aot import Job, Shape, target_of
from csd.kernels.attention_plan import (
    PAGE,
    TILE,
    Work,
    check_places,
    plan_attention_triton,
    tile_rows,
)
from csd.kernels.checks import check_tensor
from csd.kernels.merge_partials import merge_partials_triton
from csd.kernels.tree_attention_kernel import _tree_attention_kernel
from csd.kernels.tree_attention_ref import host_work, tree_attention_ref

__all__ = ["host_work", "tree_attention", "tree_attention_ref", "tree_attention_triton"]

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# rows of the tiles of slots with few rows: the smallest tile of the tensor cores
SMALL = 16


class Partials(NamedTuple):
    """Scratch between the two launches; the layers of a step share it."""

    o: torch.Tensor  # [K, R, D] float32
    lse: torch.Tensor  # [K, R] float32


def empty_partials(M: int, H: int, K: int, D: int, programs: int, device: torch.device) -> Partials:
    """Room for the partials of a pool of M rows walked by `programs` programs a KV head."""
    R = (2 * M + programs * tile_rows(H, K)) * (H // K)
    return Partials(
        torch.empty(K, R, D, dtype=torch.float32, device=device),
        torch.empty(K, R, dtype=torch.float32, device=device),
    )


def _tiles(target: str, dtype: str, D: int) -> dict[str, int]:
    """Tile sizes of the first launch; dtype: "fp16", "bf16" or "fp32"."""
    if dtype == "fp32":
        return dict(BLOCK_M=16, BLOCK_N=32 if D <= 128 else 16, num_warps=4, num_stages=1)
    if D > 128:
        # half a page a step: two stages of it fit into 64 KiB
        warps = 4 if target == "gfx942" else 8
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=warps, num_stages=2)
    # on sm_80 and sm_90 two programs fit on a multiprocessor, on gfx942 one
    stages = 3 if target == "sm_90" or (target == "sm_80" and D <= 64) else 2
    return dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=stages)


def tree_attention_triton(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    scale: float,
    work: Work | None = None,
    out: torch.Tensor | None = None,
    partials: Partials | None = None,
) -> torch.Tensor:
    """Two launches; one more where `work`, the step's `plan_attention`, is not given."""
    (M, H, D), K, G = q.shape, node_k.shape[1], prompt_len.shape[0]
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if M == 0:
        return out
    if work is None:
        work = plan_attention_triton(
            prompt_len,
            slot_len,
            slot,
            slot_start,
            slot_nodes,
            group_start,
            heads=H,
            kv_heads=K,
        )
    programs = work.program.shape[0]
    if partials is None:
        partials = empty_partials(M, H, K, D, programs, q.device)
    dtype = DTYPES[q.dtype]
    tiles = _tiles(target_of(q.device), dtype, D)
    # the interpreter multiplies bfloat16 wrongly and says nothing
    wide = dtype == "bf16" and not isinstance(_tree_attention_kernel, triton.JITFunction)
    _tree_attention_kernel[(programs * K,)](
        q_ptr=q,
        node_k_ptr=node_k,
        node_v_ptr=node_v,
        k_pages_ptr=k_pages,
        v_pages_ptr=v_pages,
        prompt_pages_ptr=prompt_pages,
        prompt_len_ptr=prompt_len,
        slot_pages_ptr=slot_pages,
        slot_len_ptr=slot_len,
        ancestors_ptr=ancestors,
        slot_start_ptr=slot_start,
        slot_nodes_ptr=slot_nodes,
        segment_ptr=work.segment,
        program_ptr=work.program,
        o_ptr=partials.o,
        lse_ptr=partials.lse,
        q_stride=q.stride(0),
        node_stride=node_k.stride(0),
        G=G,
        prompt_width=prompt_pages.stride(0),
        slot_width=slot_pages.stride(0),
        partial_rows=partials.lse.shape[1],
        scale=scale * math.log2(math.e),
        H=H,
        K=K,
        D=D,
        PAGE=PAGE,
        BLOCK_M=tiles["BLOCK_M"],
        BLOCK_SMALL=SMALL,
        BLOCK_N=tiles["BLOCK_N"],
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        DTYPE=tl.float32 if wide else getattr(tl, str(q.dtype).removeprefix("torch.")),
        PRECISION="ieee" if dtype == "fp32" else "tf32",
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
    )
    return merge_partials_triton(
        partials.o, partials.lse, work.merge, tile_rows(H, K) * (H // K), out
    )


@torch.library.custom_op("csd::tree_attention", mutates_args=("out",), device_types="cpu")
def _tree_attention(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    scale: float,
    work: list[torch.Tensor],
    out: torch.Tensor,
) -> None:
    where = (
        prompt_pages, prompt_len, slot_pages, slot_len, slot, ancestors, slot_start, slot_nodes,
        group_start,
    )  # fmt: skip
    tree_attention_ref(q, node_k, node_v, k_pages, v_pages, *where, scale, out=out)


@_tree_attention.register_kernel("cuda")
def _(*args: Any) -> None:
    *tensors, scale, work, out = args
    with torch.cuda.device_of(out):
        attend: Any = tree_attention_triton
        attend(*tensors, scale, work=Work(*work) if work else None, out=out)


@_tree_attention.register_fake
def _(*args: Any) -> Any:
    return None


def tree_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, D]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, D]
    prompt_pages: torch.Tensor,  # [G, PP] int32
    prompt_len: torch.Tensor,  # [G] int32
    slot_pages: torch.Tensor,  # [S, SP] int32
    slot_len: torch.Tensor,  # [S] int32
    slot: torch.Tensor,  # [M] int32
    ancestors: torch.Tensor,  # [M] int64
    slot_start: torch.Tensor,  # [S] int32
    slot_nodes: torch.Tensor,  # [S] int32
    group_start: torch.Tensor,  # [G + 1] int32
    scale: float,
    work: Work | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of all rows, [M, H, D]. work: the step's `plan_attention`, made here if absent.

    CPU tensors run the reference, which needs no work list. There is no backward.
    """
    _refuse_grad(q, node_k, node_v, k_pages, v_pages)
    where = (
        prompt_pages, prompt_len, slot_pages, slot_len, slot, ancestors, slot_start, slot_nodes,
        group_start,
    )  # fmt: skip
    _check(q, node_k, node_v, k_pages, v_pages, *where, work, out)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _tree_attention(
        q, node_k, node_v, k_pages, v_pages, *where, scale, list(work) if work else [], out
    )
    return out


def next_layer_attention(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *where: torch.Tensor,
    scale: float,
    work: Work | None = None,
) -> torch.Tensor:
    """`tree_attention` of a step's other layers, whose pages and places its first layer, or who
    made them, has checked. q, node_k and node_v are checked here."""
    _refuse_grad(q, node_k, node_v, k_pages, v_pages)
    _check_rows(q, node_k, node_v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _tree_attention(
        q, node_k, node_v, k_pages, v_pages, *where, scale, list(work) if work else [], out
    )
    return out


def _refuse_grad(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("tree_attention has no backward: call it under torch.no_grad()")


def _check_rows(q: torch.Tensor, node_k: torch.Tensor, node_v: torch.Tensor) -> None:
    if q.dim() != 3 or node_k.dim() != 3:
        raise ValueError(
            f"q and node_k must be [M, H, D] and [M, K, D], got {tuple(q.shape)} and "
            f"{tuple(node_k.shape)}"
        )
    (M, H, D), K, device = q.shape, node_k.shape[1], q.device
    if not K or H % K or H // K > TILE:
        raise ValueError(f"H must be 1 to {TILE} times K, got H={H}, K={K}")
    check_tensor("q", q, (M, H, D), None, device, rows_apart=True)
    for name, x in (("node_k", node_k), ("node_v", node_v)):
        check_tensor(name, x, (M, K, D), q.dtype, device, rows_apart=True)
    if node_k.stride() != node_v.stride():
        raise ValueError(f"node_v must have strides {node_k.stride()}, got {node_v.stride()}")


def _check(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    prompt_pages: torch.Tensor,
    prompt_len: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_len: torch.Tensor,
    slot: torch.Tensor,
    ancestors: torch.Tensor,
    slot_start: torch.Tensor,
    slot_nodes: torch.Tensor,
    group_start: torch.Tensor,
    work: Work | None,
    out: torch.Tensor | None,
) -> None:
    _check_rows(q, node_k, node_v)
    (M, H, D), K, device = q.shape, node_k.shape[1], q.device
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_tensor(name, x, (k_pages.shape[0], PAGE, K, D), q.dtype, device)
    places = prompt_len, slot_len, slot, slot_start, slot_nodes, group_start
    check_places(places, device)
    check_tensor("slot", slot, (M,), torch.int32, device)
    check_tensor("ancestors", ancestors, (M,), torch.int64, device)
    check_tensor("prompt_pages", prompt_pages, (prompt_len.shape[0], None), torch.int32, device)
    check_tensor("slot_pages", slot_pages, (slot_len.shape[0], None), torch.int32, device)
    for name, table, shape in zip(
        Work._fields, work or (), ((None, 6), (None, 2), (M, 4)), strict=False
    ):
        check_tensor(f"work.{name}", table, shape, torch.int32, device)
    if out is not None:
        check_tensor("out", out, (M, H, D), q.dtype, device)


def aot_jobs(target: str, shape: Shape, dtype: str) -> list[Job]:
    D, K = shape.head_dim, shape.kv_heads
    tiles = _tiles(target, dtype, D)
    floats = ("q", "node_k", "node_v", "k_pages", "v_pages")
    ints = (
        "prompt_pages",
        "prompt_len",
        "slot_pages",
        "slot_len",
        "slot_start",
        "slot_nodes",
        "segment",
        "program",
    )
    return [
        Job(
            name=f"tree_attention D={D}",
            kernel=_tree_attention_kernel,
            args={
                **{f"{name}_ptr": f"*{dtype}:16" for name in floats},
                **{f"{name}_ptr": "*i32:16" for name in ints},
                "ancestors_ptr": "*i64:16",
                "o_ptr": "*fp32:16",
                "lse_ptr": "*fp32:16",
                "q_stride": "i32:16",
                "node_stride": "i32:16",
                **{name: "i32" for name in ("G", "prompt_width", "slot_width", "partial_rows")},
                "scale": "fp32",
                "H": shape.heads,
                "K": K,
                "D": D,
                "PAGE": PAGE,
                "BLOCK_M": tiles["BLOCK_M"],
                "BLOCK_SMALL": SMALL,
                "BLOCK_N": tiles["BLOCK_N"],
                "BLOCK_D": max(16, triton.next_power_of_2(D)),
                "DTYPE": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
                "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            },
            num_warps=tiles["num_warps"],
            num_stages=tiles["num_stages"],
        )
    ]

