"""The operations of a step in one backend: the references or the Triton kernels.

The third backend, loops on a CPU, is in `csd/kernels/cpu_ops.py`; `csd/kernels/backends.py` chooses
among them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from csd.kernels.attention import tree_attention_triton
from csd.kernels.attention.commit_kv import commit_kv_ref, commit_kv_triton
from csd.kernels.attention.layout import with_layout
from csd.kernels.attention.prompt import prompt_attention
from csd.kernels.attention.reference import plan_reference, tree_attention_ref
from csd.kernels.draft import draft_tree_ref, draft_tree_triton
from csd.kernels.layers.rms_norm import rms_norm_ref, rms_norm_triton
from csd.kernels.layers.rotary import rotary_ref, rotary_triton
from csd.kernels.layers.swiglu import swiglu_ref, swiglu_triton
from csd.kernels.states.advance import advance_state_ref, advance_state_triton
from csd.kernels.states.conv import (
    commit_tail_ref,
    commit_tail_triton,
    tree_conv_ref,
    tree_conv_triton,
)
from csd.kernels.states.delta_rule import (
    tree_delta_rule_ref,
    tree_delta_rule_triton,
    tree_ssm_ref,
    tree_ssm_triton,
)
from csd.kernels.table import graph_insert_ref, graph_insert_triton, insert_observed_triton
from csd.kernels.table.observe import observe_ref, observe_triton
from csd.kernels.texts.reference import merge_ref, part_ref, representatives, spread_ref
from csd.kernels.verify import decide_triton, token_logprobs_triton, verify_ref, verify_triton
from csd.kernels.verify.advance_slots import advance_slots_ref, advance_slots_triton
from csd.kernels.verify.reference_rows import log_sum_ref
from csd.kernels.verify.snapshot import snapshot_ref, snapshot_triton
from csd.kernels.verify.token_logprobs import filtered_ref, token_logprobs_ref
from csd.state.pool_builder import node_costs, prune, roots


@dataclass(frozen=True, slots=True)
class FusedOp:
    """A function that does the work of several operations in fewer launches.

    It runs only if all of these operations are the ones in `replaces`: a benchmark that exchanges
    one of them runs the operations separately.
    """

    replaces: tuple[Callable, ...]
    fn: Callable


class TextOps(NamedTuple):
    """Operations on slots with equal text, which share rows of the model (`csd/kernels/texts`)."""

    first: Callable
    merge: Callable
    spread: Callable
    part: Callable

    def share(self, pool: Any, slots: Any) -> Any:
        """Returns the pool in which slots with equal text have one tree, with `Pool.texts`."""
        return self.spread(self.merge(pool, slots), pool, slots)


@dataclass(frozen=True, slots=True)
class Ops:
    name: str
    rms_norm: Callable
    rotary: Callable
    swiglu: Callable
    plan_attention: Callable
    tree_attention: Callable
    verify: Callable  # verifies at least the rows that decide
    verify_all: Callable  # verifies all rows
    commit_kv: Callable
    advance_slots: Callable
    roots: Callable  # builds a pool without drafts
    node_costs: Callable  # computes costs for the selection of a step's nodes
    prune: Callable  # selects the cheapest rows of a pool
    draft_tree: Callable
    observe: Callable
    graph_insert: Callable
    snapshot: Callable
    token_logprobs: Callable = token_logprobs_ref  # of tokens that were not drawn here
    # operations of layers with a state
    tree_conv: Callable = tree_conv_ref
    tree_delta_rule: Callable = tree_delta_rule_ref
    tree_ssm: Callable = tree_ssm_ref
    advance_state: Callable = advance_state_ref
    commit_tail: Callable = commit_tail_ref
    # distinct texts (`csd/kernels/texts`); None: slots with equal text do not share rows
    texts: "TextOps | None" = None
    log_sum: Callable = log_sum_ref  # of rows of logits, with the bits of `verify`
    filtered: Callable = filtered_ref  # probabilities of rows of logits after the filters
    prompt_attention: Callable = prompt_attention  # attention of chunks of prompts
    # properties of the backend
    gathers: bool = False  # attention copies keys; its sums depend on the step's other rows
    reads_device: bool = False  # operations read the device, so no CUDA graph holds them
    samples_all: bool = False  # `verify` samples rows that do not decide too
    launches: bool = False  # operations are kernels that Triton launches
    portable: bool = False  # in float32 and packed weights, the same bits on every x86 CPU
    # the operations of an exact engine where these are not: only on request, as they cost time
    exact: Callable[[], "Ops"] | None = None
    # by name of the method that calls it
    fused: Mapping[str, FusedOp] = field(default_factory=dict, hash=False)

    def forward(
        self,
        decoder: Any,
        token: torch.Tensor,
        position: torch.Tensor,
        attend: Callable,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
    ) -> torch.Tensor:
        """Run `decoder.forward` with these operations."""
        fused = self.fused.get("forward")
        parts = self.rms_norm, self.rotary, self.swiglu, self.tree_attention
        if fused is not None and fused.replaces == parts:
            hidden = fused.fn(decoder, token, position, attend, node_k, node_v)
            if hidden is not None:
                return hidden
        return decoder.forward(token, position, attend, node_k, node_v, self)

    def insert_observed(self, table: Any, pool: Any, slots: Any, verdict: Any, config: Any) -> None:
        """Run `observe` and insert its rows by `graph_insert`."""
        fused = self.fused.get("insert_observed")
        if fused is not None and fused.replaces == (self.observe, self.graph_insert):
            fused.fn(table, pool, slots, verdict, config)
            return
        rows = self.observe(pool, slots, verdict, config)
        self.graph_insert(table, *rows, slots.group_key, config.orders)

    def decide(
        self, logits: torch.Tensor, pool: Any, slots: Any, top: bool, trees: bool
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Run `verify`, `advance_slots` and `snapshot`; returns the verdict and the snapshot."""
        fused = self.fused.get("decide")
        if fused is not None and fused.replaces == (self.verify, self.advance_slots, self.snapshot):
            return fused.fn(logits, pool, slots, top, trees)
        verdict = self.verify(logits, pool, slots)
        return verdict, *self.finish(pool, slots, verdict, top, trees)

    def finish(
        self, pool: Any, slots: Any, verdict: Any, top: bool, trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `advance_slots` and `snapshot`; returns the snapshot."""
        fused = self.fused.get("finish")
        if fused is not None and fused.replaces == (self.advance_slots, self.snapshot):
            return fused.fn(pool, slots, verdict, top, trees)
        self.advance_slots(slots, verdict)
        return self.snapshot(pool, verdict, top, trees)


# the operations of a step that are compared one by one; log_sum and filtered are parts of verify
STEP_OPERATIONS = [
    f.name for f in fields(Ops) if f.type is Callable and f.name not in ("log_sum", "filtered")
]


def reference() -> Ops:
    return Ops(
        name="reference",
        rms_norm=rms_norm_ref,
        rotary=rotary_ref,
        swiglu=swiglu_ref,
        plan_attention=plan_reference,
        tree_attention=tree_attention_ref,
        verify=verify_ref,
        verify_all=verify_ref,
        commit_kv=commit_kv_ref,
        advance_slots=advance_slots_ref,
        roots=roots,
        node_costs=node_costs,
        prune=prune,
        draft_tree=draft_tree_ref,
        observe=observe_ref,
        graph_insert=graph_insert_ref,
        snapshot=snapshot_ref,
        texts=TextOps(representatives, merge_ref, spread_ref, part_ref),
        gathers=True,
        reads_device=True,
    )


def exact_triton() -> Ops:
    """The Triton kernels, with attention whose result for a row has the same bits in every step."""
    from csd.kernels.attention.triton.exact import exact_attention_triton, plan_exact_triton

    return replace(
        triton(),
        plan_attention=with_layout(plan_exact_triton),
        tree_attention=with_layout(exact_attention_triton),
    )


def triton() -> Ops:
    from csd.kernels.attention.triton.plan import plan_attention_triton

    fused = {
        "insert_observed": FusedOp((observe_triton, graph_insert_triton), insert_observed_triton),
        "decide": FusedOp((verify_triton, advance_slots_triton, snapshot_triton), decide_triton),
    }
    return Ops(
        name="triton",
        rms_norm=rms_norm_triton,
        rotary=rotary_triton,
        swiglu=swiglu_triton,
        plan_attention=with_layout(plan_attention_triton),
        tree_attention=with_layout(tree_attention_triton),
        verify=verify_triton,
        verify_all=verify_triton,
        commit_kv=commit_kv_triton,
        advance_slots=advance_slots_triton,
        roots=roots,
        node_costs=node_costs,
        prune=prune,
        draft_tree=draft_tree_triton,
        observe=observe_triton,
        graph_insert=graph_insert_triton,
        snapshot=snapshot_triton,
        token_logprobs=token_logprobs_triton,
        tree_conv=tree_conv_triton,
        tree_delta_rule=tree_delta_rule_triton,
        tree_ssm=tree_ssm_triton,
        advance_state=advance_state_triton,
        commit_tail=commit_tail_triton,
        fused=fused,
        samples_all=True,
        launches=True,
        exact=exact_triton,
    )
