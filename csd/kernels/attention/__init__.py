"""Attention of every pool row over its prompt, its slot's committed tokens and its tree.

    P(m) = the prompt tokens of row m's group             prompt_pages, prompt_len
    C(m) = the committed tokens of row m's slot           slot_pages, slot_len
    N(m) = the nodes j of its slot with bit j of ancestors[m] set     pool row slot_start + j
    out[m, h] = sum of softmax(scale * q[m, h] . k[t, h // (H / K)]) v[t, h // (H / K)]
                over t in P(m), C(m) and N(m) together

Rows are ordered by group, then slot; rows of no slot give zeros. The mask is the ancestor word,
which is applied to nodes only.

A call may have a window or a chunk, which exclude the first of these keys
(`triton/first_keys.py`), a cap on scores, sinks, and values of another size (`reference.py` has the
formula).

On a GPU, two launches. The first walks the step's work list (`triton/plan.py`): a segment is a tile
of rows that share keys, packed with the query heads of a key-value head into one matrix product,
and a run of those keys. A prompt's tiles have rows of all its samples. Scores are in base 2 (scale
times log2 e); a segment writes a normalised partial result o and its lse = log2(sum of 2^score).
The second launch merges them for each row (`triton/merge.py`): sum of 2^(lse - max lse) o over the
sum of the weights. A head's sink is one more term, without a value.

`triton/exact.py` computes the same with an order of sums that no other row changes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from csd.kernels.attention.layout import LAYOUT, TILE, TreeLayout, Work, check_layout, check_reach
from csd.kernels.attention.reference import tree_attention_ref
from csd.kernels.common.operator import RecordOperator, launcher
from csd.state.kv_cache import PAGE
from csd.state.record import check_tensor

__all__ = [
    "TreeLayout",
    "next_layer_attention",
    "tree_attention",
    "tree_attention_ref",
    "tree_attention_triton",
]


# types of a call's optional properties, the last arguments of the operators
PROPERTIES = {"window": "SymInt?", "chunk": "SymInt?", "softcap": "float?", "sinks": "Tensor?"}


@launcher
def tree_attention_triton() -> Callable:
    from csd.kernels.attention.triton.launch import tree_attention_triton

    return tree_attention_triton


def _by_name(attend: Callable) -> Callable:
    """`attend` with the layout's fields and the properties as keywords, without a work list."""

    @wraps(attend)
    def call(*args: Any) -> None:
        *keys, layout, scale, _work, out = args[: -len(PROPERTIES)]
        properties = dict(zip(PROPERTIES, args[-len(PROPERTIES) :], strict=True))
        attend(*keys, **layout._asdict(), scale=scale, out=out, **properties)

    return call


def attention_operator(
    name: str, launch: Callable, work_list: type, loop: Callable | None = None
) -> RecordOperator:
    """Operator of an attention kernel: `launch` on a GPU, `loop` or the reference on a CPU.

    work_list is the named tuple that `launch` takes as `work`.
    """

    @wraps(launch)
    def on_gpu(*args: Any) -> None:
        *operands, work, out = args[: -len(PROPERTIES)]
        properties = dict(zip(PROPERTIES, args[-len(PROPERTIES) :], strict=True))
        launch(*operands, work=work_list(*work) if work else None, out=out, **properties)

    return RecordOperator(
        name,
        (
            *(f"Tensor {name}" for name in ("q", "node_k", "node_v", "k_pages", "v_pages")),
            LAYOUT,
            "float scale",
            "Tensor[] work",
            "Tensor! out",
            *(f"{kind} {name}" for name, kind in PROPERTIES.items()),
        ),
        _by_name(tree_attention_ref),
        on_gpu,
        loop=loop,
    )


def _loop() -> tuple[Callable[..., bool], Callable]:
    from csd.kernels.attention.cpu import attention
    from csd.kernels.numba.tensors import readable

    return (lambda *args: readable(*args[:5])), _by_name(attention.tree_attention)


_tree_attention = attention_operator("tree_attention", tree_attention_triton, Work, _loop)


def tree_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    layout: TreeLayout,
    scale: float,
    work: Work | None = None,
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of all rows [M, H, Dv]. work: of `plan_attention`, made if None.

    window: most keys that a row attends to, its own included. chunk: a row attends to keys with
    its own position // chunk. softcap: scores are softcap * tanh(score / softcap). sinks: [H], one
    more score per head, without a value. `work` must be made for the same window and chunk.

    CPU tensors run the loop or the reference, which need no work list. Not differentiable;
    `packed_attention` is.
    """
    check_operands(q, node_k, node_v, k_pages, v_pages, layout, scale)
    check_properties(q, window, chunk, softcap, sinks)
    if work is not None:
        check_reach_of(work, window, chunk)
        shapes = (None, 6), (None, 2), (q.shape[0], 4), (q.shape[0], 2), (q.shape[0],)
        for name, table, shape in zip(Work._fields, work, shapes, strict=True):
            kind = torch.int64 if name == "seen" else torch.int32
            if table is not None:
                check_tensor(f"work.{name}", table, shape, kind, q.device)
    if out is not None:
        shape = *q.shape[:2], node_v.shape[2]
        check_tensor("out", out, shape, q.dtype, q.device)
    operands = q, node_k, node_v, k_pages, v_pages, layout, scale
    return _attend(operands, work, out, window, chunk, softcap, sinks)


def next_layer_attention(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    work: Work | None = None,
) -> torch.Tensor:
    """`tree_attention` for a step's other layers, without checks of pages and layout.

    These were checked for the first layer or when they were made. q, node_k and node_v are checked.
    """
    _refuse_grad(q, node_k, node_v, k_pages, v_pages)
    _check_rows(q, node_k, node_v)
    operands = q, node_k, node_v, k_pages, v_pages, layout, scale
    return _attend(operands, work, None, *[None] * len(PROPERTIES))


def _attend(
    operands: tuple, work: Work | None, out: torch.Tensor | None, *properties: Any
) -> torch.Tensor:
    q, _, node_v = operands[:3]
    out = q.new_empty(*q.shape[:2], node_v.shape[2]) if out is None else out
    _tree_attention(*operands, [x for x in work or () if x is not None], out, *properties)
    return out


def check_operands(
    q: torch.Tensor,
    node_k: torch.Tensor,
    node_v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    layout: TreeLayout,
    scale: float,
) -> None:
    """Raises the errors of `tree_attention` for its operands."""
    _refuse_grad(q, node_k, node_v, k_pages, v_pages)
    _check_rows(q, node_k, node_v)
    M, K, device = q.shape[0], node_k.shape[1], q.device
    for name, x, size in (("k_pages", k_pages, q.shape[2]), ("v_pages", v_pages, node_v.shape[2])):
        check_tensor(name, x, (k_pages.shape[0], PAGE, K, size), q.dtype, device)
    check_layout(layout, M, device)
    # kernels take the maximum of scores before they scale it
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")


def check_properties(
    q: torch.Tensor,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raises ValueError for an invalid window, chunk, softcap or sinks."""
    check_reach(window, chunk)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[1],), None, q.device)


def check_reach_of(work: Any, window: int | None, chunk: int | None) -> None:
    """Raises ValueError if only the work list or only the call has a window or a chunk."""
    if (work.first is None) != (window is chunk is None):
        raise ValueError(
            f"work must be made with the window={window} and chunk={chunk} of the call"
        )


def _refuse_grad(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "tree_attention has no backward: call it under torch.no_grad(), or use packed_attention"
        )


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
    check_tensor("node_k", node_k, (M, K, D), q.dtype, device, rows_apart=True)
    shape = (M, K, node_v.shape[-1])
    check_tensor("node_v", node_v, shape, q.dtype, device, rows_apart=True)
    if shape[2] == D and node_k.stride() != node_v.stride():
        raise ValueError(f"node_v must have strides {node_k.stride()}, got {node_v.stride()}")
