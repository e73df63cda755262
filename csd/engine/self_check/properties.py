"""Checks of attention with windows, chunks, caps and sinks, which few models have."""

from collections.abc import Callable

import torch

from csd.engine.self_check.report import Check
from csd.engine.self_check.trees import Trees
from csd.kernels.attention.layer import LayerAttention
from csd.kernels.attention.reference import Properties
from csd.kernels.ops import Ops
from csd.models.fused.config import ModelConfig, scale_of
from csd.state.device import upload
from csd.state.kv_cache import PAGE

# one window ends inside a page, another hides nodes of a path
CASES = {
    "a window": dict(window=PAGE + 6), "a window shorter than a path": dict(window=3),
    "chunks": dict(chunk=PAGE - 1), "a cap": dict(softcap=2.0), "sinks": {},
    "a window, a cap and sinks": dict(window=PAGE + 6, softcap=2.0),
}  # fmt: skip
# tokens of each group's prompt and of each slot, and the group of each slot
PROMPTS, LENGTHS, GROUPS = (3 * PAGE + 7, 5), (2 * PAGE + 1, 0, 70), (0, 0, 1)
PARENTS = ((-1, 0, 1, 1, 2, 4, 5), (-1,), (-1, 0, 0))


def property_checks() -> dict[str, Check]:
    """A check for each case, by the case's name."""
    return {name: Check(f"tree_attention with {name}") for name in CASES}


@torch.no_grad()
def run_properties(
    ops: Ops, config: ModelConfig, device: torch.device, dtype: torch.dtype,
    rows: dict[str, Check], compared: Callable[[Check], Callable],
) -> None:  # fmt: skip
    """Run the attention of every case at the config's head sizes.

    compared: returns the wrapped attention operation that records its comparison in a check.
    """
    generator = torch.Generator().manual_seed(0)
    H, K, D = config.heads, config.kv_heads, config.head_dim
    trees = Trees.of(PARENTS, device)

    def normal(*shape: int) -> torch.Tensor:
        return upload(torch.randn(shape, generator=generator).to(dtype), device)

    def whole(values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), device)

    M, pages = trees.slot.shape[0], 0
    tables = []
    for lengths in (PROMPTS, LENGTHS):
        table = torch.full((len(lengths), -(-max(lengths) // PAGE)), -1, dtype=torch.int32)
        for row, tokens in enumerate(lengths):
            count = -(-tokens // PAGE)
            table[row, :count] = torch.arange(pages, pages + count)
            pages += count
        tables.append(upload(table, device))
    # rows are ordered by group
    ends = [sum(len(p) for p, at in zip(PARENTS, GROUPS, strict=True) if at < g)
            for g in range(len(PROMPTS) + 1)]  # fmt: skip
    where = dict(
        prompt_pages=tables[0], prompt_len=whole([*PROMPTS]), slot_pages=tables[1],
        slot_len=whole([*LENGTHS]), slot=trees.slot, ancestors=trees.ancestors,
        slot_start=trees.slot_start, slot_nodes=trees.slot_nodes, group_start=whole(ends),
    )  # fmt: skip
    q, node_k, node_v = normal(M, H, D), normal(1, M, K, D), normal(1, M, K, D)
    k, v = (normal(1, pages, PAGE, K, D) for _ in range(2))
    for name, given in CASES.items():
        attend = LayerAttention(
            compared(rows[name]), node_k, node_v, k, v, where, None, scale_of(config),
            plan=ops.plan_attention,
        )  # fmt: skip
        properties = Properties(K, D, D, scale_of(config), **given)  # type: ignore[arg-type]
        attend(0, q, properties=properties, sinks=normal(H) if "sinks" in name else None)
