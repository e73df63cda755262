"""Tree attention on a GPU whose result for a row has the same bits in every step.

Formula and layout are those of `csd/kernels/tree_attention/`. Here the order in which a row's keys
are added is fixed. With n generated keys, including those on its path and its own:

    prompt   its pages by matrix products, cut at places that its length sets
    body     the slot's first T = 64 floor(max(n - 17, 0) / 64) tokens: whole pages, by the same
             products, cut every SLOT_PAGES pages
    tail     the other 1 to 80 keys, one row's alone, gathered in order of position

A node is at most 16 deep, so the body is committed whatever a step drafts, and a key of the tail is
read the same way whether it is committed or a node. Partial results are added in order of position.
Tiles always have the same number of rows, so that there is one kind of matrix instruction; masked
keys add exact zeros.

Two launches per layer: `pages` writes a partial result for every cut, `tail` adds them up and
continues with the tail. The work list of both is made once per step (`plan.py`). The reference is
`tree_attention_ref`, which adds in another order: the two agree up to rounding.
"""

from functools import wraps
from typing import Any

import torch

from csd.kernels.checks import check_tensor
from csd.kernels.exact_attention.constants import TAIL
from csd.kernels.exact_attention.launch import exact_attention_triton
from csd.kernels.exact_attention.plan import (
    ExactWork,
    plan_exact,
    plan_exact_ref,
    plan_exact_triton,
)
from csd.kernels.torch_operators import Fields, RecordOperator
from csd.kernels.tree_attention import (
    PROPERTIES,
    check_operands,
    check_properties,
    check_reach_of,
)
from csd.kernels.tree_attention.layout import TreeLayout
from csd.kernels.tree_attention.reference import tree_attention_ref

__all__ = [
    "ExactWork", "exact_attention", "exact_attention_triton", "plan_exact", "plan_exact_ref",
    "plan_exact_triton",
]  # fmt: skip


@wraps(tree_attention_ref)
def _on_cpu(*args: Any) -> None:
    *keys, layout, scale, _work, out, window, chunk, softcap, sinks = args
    tree_attention_ref(
        *keys, **layout._asdict(), scale=scale, out=out, window=window, chunk=chunk,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip


@wraps(exact_attention_triton)
def _on_gpu(*args: Any) -> None:
    *operands, work, out, window, chunk, softcap, sinks = args
    attend: Any = exact_attention_triton
    attend(
        *operands, work=ExactWork(*work) if work else None, out=out, window=window, chunk=chunk,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip


_exact_attention = RecordOperator(
    "exact_attention",
    (
        *(f"Tensor {name}" for name in ("q", "node_k", "node_v", "k_pages", "v_pages")),
        Fields("layout", spread=True, make=TreeLayout),
        "float scale",
        "Tensor[] work",
        "Tensor! out",
        *PROPERTIES,
    ),
    _on_cpu,
    _on_gpu,
)


def exact_attention(
    q: torch.Tensor,  # [M, H, D]
    node_k: torch.Tensor,  # [M, K, D]
    node_v: torch.Tensor,  # [M, K, Dv]
    k_pages: torch.Tensor,  # [n_pages, 64, K, D]
    v_pages: torch.Tensor,  # [n_pages, 64, K, Dv]
    layout: TreeLayout,
    scale: float,
    work: ExactWork | None = None,
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """Returns the attention of all rows [M, H, Dv]. work: the step's `plan_exact`, made if None.

    window, chunk, softcap, sinks: as in `tree_attention`; `work` must be made for the same.

    CPU tensors run the reference, which needs no work list. Not differentiable. No node may be
    deeper than MAX_DEPTH.
    """
    check_operands(q, node_k, node_v, k_pages, v_pages, layout, scale)
    check_properties(q, window, chunk, softcap, sinks)
    M = q.shape[0]
    if work is not None:
        check_reach_of(work, window, chunk)
        shapes = (None, 6), (1,), (M, 6), (M, TAIL), (M, 2)
        for name, table, shape in zip(ExactWork._fields, work, shapes, strict=True):
            if table is not None:
                check_tensor(f"work.{name}", table, shape, torch.int32, q.device)
    shape = M, q.shape[1], node_v.shape[2]
    out = q.new_empty(shape) if out is None else out
    check_tensor("out", out, shape, q.dtype, q.device)
    tables = [x for x in work or () if x is not None]
    operands = q, node_k, node_v, k_pages, v_pages, layout, scale, tables, out
    _exact_attention(*operands, window, chunk, softcap, sinks)
    return out
