"""Launches of a model's steps, on tensors that have a shape but no memory.

In addition to a step of the default graph: steps of the other benchmarked graphs, the norm of heads
that some models have, operations that other models use (`csd.apply_kernels`), and a cache that
needs more than 32 bits for its indices.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.lib.graphs import DEEP, SHALLOW
from bench.lib.kernel_shape import Shape
from csd.graph.consensus import WITH_HISTORY, WITH_PRIOR
from csd.graph.prior import PRIOR_CONFIG
from csd.kernels.attention.packed.triton.backward import packed_attention_backward_triton
from csd.kernels.attention.packed.triton.forward import packed_attention_triton
from csd.kernels.draft.paper.layered_dag import layered_dag_triton
from csd.kernels.draft.paper.suffix_match import suffix_match_triton
from csd.kernels.draft.sample_words import sample_words_triton
from csd.kernels.layers.gated_linear import gated_linear_triton
from csd.kernels.layers.rms_norm import rms_norm_triton
from csd.kernels.layers.rotary import rotary_triton, rotate_triton
from csd.kernels.layers.row_linear import ROW_TILES, row_linear_triton, splits_of
from csd.kernels.layers.swiglu import silu_mul_triton
from csd.kernels.ops import Ops, exact_triton, triton
from csd.kernels.states.paths import DEPTHS
from csd.research.draft_models.distributions import CANDIDATES
from csd.state.context_table import GraphConfig, Table
from csd.state.kv_cache import PAGE
from csd.state.pool import Pool
from csd.state.recurrent import TAIL
from csd.state.slots import Slots
from csd.state.texts import DagConfig, SlotTexts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
META = torch.device("meta")
# sizes of which kernels depend only on whether they are 1, which none is
SLOTS, ROWS, PAGES, TOKENS, POSITIONS = 5, 64, 9, 64, 512
# additional properties of an attention, by name; dv: the size of keys over that of values
PROPERTIES: dict[str, dict] = {
    "window, cap, sinks": dict(window=128, softcap=50.0, sinks=True),
    "window": dict(window=128),
    "cap": dict(softcap=50.0),
    "short values": dict(dv=2),
}
# size of a layer's pages with more than 2^31 values, and bytes
LARGE = 1 << 31


def launches(shape: Shape, dtype: str) -> list[tuple[str, Callable[[], object]]]:
    """Returns (label, function): the function launches, the label has what a job's name omits."""
    ops, model = triton(), _Model(shape, DTYPES[dtype])
    each = PAGE * shape.kv_heads * shape.head_dim
    return [
        ("", lambda: graph_step(ops, model, GraphConfig())),
        ("", lambda: graph_step(ops, model, SHALLOW)),
        ("", lambda: graph_step(ops, model, DEEP)),
        ("with history", lambda: graph_step(ops, model, GraphConfig(**WITH_HISTORY))),
        ("with prior", lambda: prior_step(ops, model, GraphConfig(**WITH_PRIOR))),
        ("chain", lambda: layered_step(model, DagConfig())),
        ("tree", lambda: layered_step(model, DagConfig(tree=True))),
        ("", lambda: draft_model_words(model)),
        ("", lambda: layer(ops, model, PAGES)),
        ("large cache", lambda: layer(ops, model, LARGE // each + 1)),
        ("", lambda: layer(exact_triton(), model, PAGES)),
        *(
            (name, partial(attention, of, model, **named))
            for name, named in PROPERTIES.items()
            for of in (ops, exact_triton())
        ),
        ("", partial(packed, model)),
        *((name, partial(packed, model, **named)) for name, named in PROPERTIES.items()),
        ("with residual", lambda: ops.rms_norm(model.x, model.norm, 1e-5, model.x)),
        ("of rows", lambda: first_norm(ops, model)),
        ("plus one", lambda: ops.rms_norm(model.x, model.norm, 1e-5, model.x, plus_one=True)),
        ("gelu", lambda: ops.swiglu(model.empty(ROWS, 2 * shape.intermediate), gelu=True)),
        ("of a part", lambda: partial_rotary(model)),
        ("", lambda: ops.rms_norm(model.q, model.empty(shape.head_dim), 1e-5)),
        ("rotate", lambda: rotate_triton(model.q, model.k, *model.cos_sin(ROWS))),
        ("split", lambda: products(model, split=True)),
        ("", lambda: products(model, split=False)),
        ("with bias", lambda: products(model, split=False, bias=True)),
        ("", lambda: gated_products(model)),
        ("of splits", lambda: behind_splits(model)),
        ("of splits, with bias", lambda: rotary_of_splits(model, bias=True)),
        ("", lambda: states(ops, model)),
        ("silu_mul", lambda: silu_mul_triton(*2 * [model.empty(ROWS, shape.intermediate)])),
    ]


class _Model:
    """Operands of the shape's layers: rows of hidden states, and heads of one fused product."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        H, K, D = shape.heads, shape.kv_heads, shape.head_dim
        self.shape, self.dtype = shape, dtype
        self.x, self.norm = self.empty(ROWS, shape.hidden), self.empty(shape.hidden)
        parts = self.empty(ROWS, (H + 2 * K) * D).split((H * D, K * D, K * D), dim=-1)
        self.q, self.k, self.v = (x.view(ROWS, -1, D) for x in parts)

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(size, dtype=dtype or self.dtype, device=META)

    def cos_sin(self, rows: int, rotated: int | None = None) -> list[torch.Tensor]:
        return [self.empty(rows, rotated or self.shape.head_dim) for _ in range(2)]


def _places(config: GraphConfig, vocab: int) -> tuple[Pool, Slots]:
    slots = Slots.empty(SLOTS, vocab, TOKENS, config.context, device=META)
    return Pool.empty(ROWS, SLOTS, SLOTS, config.context, META), slots


def graph_step(ops: Ops, model: _Model, config: GraphConfig) -> None:
    """Launch all kernels of a step except those of the model's layers."""
    vocab, table = model.shape.vocab, Table.empty(config, META)
    _, slots = _places(config, vocab)
    pool = ops.draft_tree(table, slots, ROWS, config)
    logits = model.empty(ROWS, vocab)
    verdict, *_ = ops.decide(logits, pool, slots, False, False)
    ops.insert_observed(table, pool, slots, verdict, config)
    # the same operations one by one, as other callers launch them
    verdict = ops.verify(logits, pool, slots)
    ops.advance_slots(slots, verdict)
    observed = ops.observe(pool, slots, verdict, config)
    ops.graph_insert(table, *observed, slots.group_key, config.orders)
    ops.snapshot(pool, verdict, False, False)


def prior_step(ops: Ops, model: _Model, config: GraphConfig) -> None:
    """Launch the kernels of a draft from a graph with a prior."""
    table, (_, slots) = Table.empty(config, META), _places(config, model.shape.vocab)
    table.prior = Table.empty(PRIOR_CONFIG, META)
    ops.draft_tree(table, slots, ROWS, config)


# key heads, value heads and the sizes of both in layers of Qwen3-Next and Qwen3.5
STATE_HEADS, CHANNELS = (16, 32, 128, 128), 8192


def states(ops: Ops, model: _Model) -> None:
    """Launch the kernels of a layer with a state, and of its commit at the end of a step."""
    Hk, H, Dk, Dv = STATE_HEADS

    def wide(*size: int) -> torch.Tensor:
        return model.empty(*size, dtype=torch.float32)

    def whole(*size: int) -> torch.Tensor:
        return model.empty(*size, dtype=torch.int32)

    slot, position, path = whole(ROWS), whole(ROWS), whole(ROWS, DEPTHS)
    x, weight, tail = (model.empty(*s, CHANNELS) for s in ((ROWS,), (4,), (SLOTS, 3)))
    ops.tree_conv(x, weight.view(CHANNELS, 4), None, tail, slot, position, path, True)
    keys, values, heads = wide(ROWS, Hk, Dk), wide(ROWS, H, Dv), wide(ROWS, H)
    state_tensors = (
        wide(2, SLOTS, H, Dk, Dv),
        wide(2, SLOTS, TAIL, Hk, Dk),
        wide(2, SLOTS, TAIL, H, Dv),
        wide(2, SLOTS, TAIL, H),
    )
    base = whole(SLOTS)
    rest = (
        keys,
        heads,
        values,
        *(part[0] for part in state_tensors),
        base,
        slot,
        position,
        path,
        base,
        base,
    )
    ops.tree_delta_rule(keys, values, heads, *rest)
    ops.tree_ssm(keys, *rest)
    ops.advance_state(*state_tensors, base, base)
    node, rows = wide(2, ROWS, H * Dv), whole(SLOTS, 17)
    ops.commit_tail(node, state_tensors[2].flatten(3), base, rows, base)


def first_norm(ops: Ops, model: _Model) -> None:
    rows = model.empty(ROWS, dtype=torch.int32)
    embedding = model.empty(model.shape.vocab, model.shape.hidden)
    ops.rms_norm(embedding, model.norm, 1e-5, rows=rows)


def partial_rotary(model: _Model) -> None:
    """Launch the rotary embedding of three quarters of each head."""
    K, D = model.shape.kv_heads, model.shape.head_dim
    position, node = model.empty(ROWS, dtype=torch.int32), model.empty(2, ROWS, K, D)
    tables = model.cos_sin(POSITIONS, D * 3 // 4)
    rotary_triton(model.q, model.k, model.v, position, *tables, *node)


def layered_step(model: _Model, config: DagConfig) -> None:
    """Launch the kernels of `drafter="paper"`."""
    slots = Slots.empty(SLOTS, model.shape.vocab, TOKENS, config.k, device=META)
    texts = SlotTexts.empty(SLOTS, TOKENS, config.k, META)
    sizes = config.k, config.edits, config.candidates, config.tokens
    layered_dag_triton(suffix_match_triton(texts, slots, *sizes), slots, ROWS, config)


def draft_model_words(model: _Model) -> None:
    """Launch the kernels of `drafter=csd.DraftModel(..)` apart from the draft model's layers."""
    slots = Slots.empty(SLOTS, model.shape.vocab, TOKENS, 1, device=META)
    slot, place = (model.empty(ROWS, dtype=torch.int32) for _ in range(2))
    token = model.empty(ROWS, CANDIDATES, dtype=torch.int32)
    sample_words_triton(slots.key, slots.sample, slot, place, token)


def products(model: _Model, split: bool, bias: bool = False) -> None:
    """Launch a layer's exact-row products, with split K or without; with `bias`, the biased one."""
    shape, empty = model.shape, model.empty
    H, K, D, hidden = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden
    biased = [((H + 2 * K) * D, hidden)]
    inner = shape.intermediate
    sizes = [*biased, (hidden, H * D), (2 * inner, hidden), (hidden, inner)]
    for n, k in biased if bias else sizes:
        if not bias and split != (splits_of(n, k, model.dtype)[0] > 1):
            continue
        for rows in ROW_TILES:
            row_linear_triton(empty(rows, k), empty(n, k), empty(n) if bias else None)


def gated_products(model: _Model) -> None:
    shape, empty = model.shape, model.empty
    for rows in ROW_TILES:
        gated_linear_triton(empty(rows, shape.hidden), empty(2 * shape.intermediate, shape.hidden))


def behind_splits(model: _Model) -> None:
    """Launch the sums of exact-row products with split K."""
    shape, x = model.shape, model.x
    for k in (shape.heads * shape.head_dim, shape.intermediate):
        splits = splits_of(shape.hidden, k, model.dtype)[0]
        if splits > 1:
            parts = model.empty(splits, *x.shape, dtype=torch.float32)
            rms_norm_triton(parts, model.norm, 1e-5, x)
    rotary_of_splits(model, bias=False)


def rotary_of_splits(model: _Model, bias: bool) -> None:
    shape = model.shape
    H, K, D = shape.heads, shape.kv_heads, shape.head_dim
    splits = splits_of((H + 2 * K) * D, shape.hidden, model.dtype)[0]
    if splits == 1:
        return
    position, node = model.empty(ROWS, dtype=torch.int32), model.empty(2, ROWS, K, D)
    parts = model.empty(splits, ROWS, (H + 2 * K) * D, dtype=torch.float32)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in parts.split((H * D, K * D, K * D), dim=-1))
    added = model.empty((H + 2 * K) * D) if bias else None
    rotary_triton(q, k, v, position, *model.cos_sin(POSITIONS), *node, added)


def attention(
    ops: Ops,
    model: _Model,
    sinks: bool = False,
    dv: int = 1,
    window: int | None = None,
    **named: Any,
) -> None:
    """Launch the attention of a layer with a window, a cap, sinks or short values."""
    shape, empty = model.shape, model.empty
    H, K, D = shape.heads, shape.kv_heads, shape.head_dim
    layout = _layout(*_places(GraphConfig(), shape.vocab))
    work = ops.plan_attention(heads=H, kv_heads=K, window=window, **layout)
    ops.tree_attention(
        empty(ROWS, H, D),
        empty(ROWS, K, D),
        empty(ROWS, K, D // dv),
        empty(PAGES, PAGE, K, D),
        empty(PAGES, PAGE, K, D // dv),
        scale=D**-0.5,
        work=work,
        window=window,
        sinks=empty(H) if sinks else None,
        **named,
        **layout,
    )


def packed(model: _Model, sinks: bool = False, dv: int = 1, **named: Any) -> None:
    """Launch the attention of packed samples and its gradients."""
    shape, empty = model.shape, model.empty
    H, K, D = shape.heads, shape.kv_heads, shape.head_dim
    q, k, v, out = (empty(ROWS, n, d) for n, d in ((H, D), (K, D), (K, D // dv), (H, D // dv)))
    end, position = (empty(ROWS, dtype=torch.int32) for _ in range(2))
    named["sinks"] = empty(H) if sinks else None
    _, lse = packed_attention_triton(q, k, v, end, position, D**-0.5, **named)
    packed_attention_backward_triton(
        torch.empty_like(out), q, k, v, out, lse, end, position, D**-0.5, **named
    )


def _layout(pool: Pool, slots: Slots) -> dict[str, torch.Tensor]:
    prompt_pages, slot_pages = (
        torch.empty(SLOTS, 2, dtype=torch.int32, device=META) for _ in range(2)
    )
    return dict(
        prompt_pages=prompt_pages,
        prompt_len=slots.prompt_len,
        slot_pages=slot_pages,
        slot_len=slots.generated,
        slot=pool.slot,
        ancestors=pool.ancestors,
        slot_start=pool.slot_start,
        slot_nodes=pool.slot_nodes,
        group_start=pool.group_start,
    )


def layer(ops: Ops, model: _Model, pages: int) -> None:
    """Launch a layer, and the commit of all layers' keys and values to `pages` pages."""
    shape, empty = model.shape, model.empty
    H, K, D = shape.heads, shape.kv_heads, shape.head_dim
    pool, slots = _places(GraphConfig(), shape.vocab)
    node_k, node_v = (empty(2, ROWS, K, D) for _ in "kv")
    k_pages, v_pages = (empty(2, pages, PAGE, K, D) for _ in "kv")
    ops.rms_norm(model.x, model.norm, 1e-5)
    q = ops.rotary(
        model.q, model.k, model.v, pool.position, *model.cos_sin(POSITIONS), node_k[0], node_v[0]
    )
    layout = _layout(pool, slots)
    work = ops.plan_attention(heads=H, kv_heads=K, **layout)
    ops.tree_attention(
        q, node_k[0], node_v[0], k_pages[0], v_pages[0], scale=D**-0.5, work=work, **layout
    )
    ops.swiglu(empty(ROWS, 2 * shape.intermediate))
    accept_row = empty(SLOTS, 17, dtype=torch.int32)
    for moved in (True, False):
        ops.commit_kv(
            node_k,
            node_v,
            k_pages,
            v_pages,
            layout["slot_pages"],
            slots.generated,
            accept_row,
            slots.step,
            moved,
        )
