"""Attention of a step's rows, over the prompt's pages, the slot's pages and the pool's nodes."""

from csd.kernels.attention.layer import LayerAttention
from csd.kernels.ops import Ops
from csd.kernels.states import StepStates
from csd.models.fused.config import ModelSizes, scale_of
from csd.state.kv_cache import KVCache
from csd.state.pool import Pool
from csd.state.slots import Slots


def pool_attention(
    ops: Ops, config: ModelSizes, cache: KVCache, slots: Slots, pool: Pool
) -> LayerAttention:
    """Returns the attention of the pool's rows, which the decoder calls in each layer."""
    layout = dict(
        prompt_pages=cache.prompt_pages,
        prompt_len=slots.prompt_len,
        slot_pages=cache.slot_pages,
        slot_len=slots.generated,
        slot=pool.slot,
        ancestors=pool.ancestors,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
    )
    work = ops.plan_attention(heads=config.heads, kv_heads=config.kv_heads, **layout)
    node_k, node_v = cache.nodes(pool.rows)
    return LayerAttention(
        ops.tree_attention, node_k, node_v, cache.k, cache.v, layout, work, scale_of(config),
        plan=ops.plan_attention,
        works={(config.heads, config.kv_heads, None, None): work},
        states=cache.states and StepStates.of(ops, cache.states.slots, pool),
    )  # fmt: skip
