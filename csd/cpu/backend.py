"""The loops that other packages use, and the backend's operations."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from csd.cpu.advance_state import advance_state
from csd.cpu.attention import plan_attention, tree_attention
from csd.cpu.commit_kv import commit_kv
from csd.cpu.commit_tail import commit_tail
from csd.cpu.compiled import before_compiling
from csd.cpu.decide import decide
from csd.cpu.draft_tree import draft_tree
from csd.cpu.forward import forward
from csd.cpu.graph_insert import graph_insert
from csd.cpu.insert_observed import insert_observed
from csd.cpu.isa import instruction, instructions, multiplies
from csd.cpu.layers import LOW, rms_norm, rotary, swiglu
from csd.cpu.lora import add
from csd.cpu.observe import observe
from csd.cpu.pools import node_costs, prune, roots
from csd.cpu.products import by_columns, fits, in_loops, product
from csd.cpu.threads import threads
from csd.cpu.tree_conv import tree_conv
from csd.cpu.tree_states import tree_delta_rule, tree_ssm
from csd.cpu.verify import verify
from csd.cpu.verify_passes import PASSES
from csd.kernels.ops import FusedOp, Ops, reference
from csd.kernels.verify import verify_ref

__all__ = [
    "add", "before_compiling", "by_columns", "fits", "in_loops", "instruction", "instructions",
    "multiplies", "ops", "product", "threads", "tree_attention",
]  # fmt: skip


def ops(dtype: torch.dtype) -> Ops:
    """The operations of a step, for tensors of a dtype.

    In float64 the references compute norm, rotary embedding and SwiGLU: a norm's statistics, which
    are float32 in any dtype, cause the largest difference from transformers, and the reference sums
    them as transformers does. They also compute layers with a state, since float64 serves for
    comparisons.
    """
    plain = reference()
    fused = {
        "forward": FusedOp((rms_norm, rotary, swiglu, tree_attention), forward),
        "decide": FusedOp((verify, plain.advance_slots, plain.snapshot), decide),
        "insert_observed": FusedOp((observe, graph_insert), insert_observed),
    }
    of_layers: dict[str, Any] = {}
    if dtype in LOW:
        of_layers = dict(
            rms_norm=rms_norm,
            rotary=rotary,
            swiglu=swiglu,
            tree_conv=tree_conv,
            tree_delta_rule=tree_delta_rule,
            tree_ssm=tree_ssm,
            advance_state=advance_state,
        )
    return replace(
        plain,
        name="cpu",
        **of_layers,
        plan_attention=plan_attention,
        tree_attention=tree_attention,
        verify=verify,
        verify_all=partial(verify_ref, passes=PASSES),
        passes=PASSES,
        commit_kv=commit_kv,
        commit_tail=commit_tail,
        roots=roots,
        node_costs=node_costs,
        prune=prune,
        draft_tree=draft_tree,
        observe=observe,
        graph_insert=graph_insert,
        fused=fused,
    )
