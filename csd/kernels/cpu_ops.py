"""The loops that other packages use, and the backend's operations."""

from dataclasses import replace
from typing import Any

import torch

from csd.kernels.attention.cpu.attention import plan_attention, tree_attention
from csd.kernels.attention.cpu.commit_kv import commit_kv
from csd.kernels.attention.cpu.prompt import prompt_attention
from csd.kernels.draft.cpu.draft_tree import draft_tree
from csd.kernels.draft.cpu.pools import node_costs, prune, roots
from csd.kernels.layers.cpu.decoder import forward
from csd.kernels.layers.cpu.elementwise import LOW, rms_norm, rotary, swiglu
from csd.kernels.layers.cpu.linear import by_columns, by_rows, fits, in_loops, product
from csd.kernels.layers.cpu.lora import add
from csd.kernels.numba.isa import instruction, instructions, multiplies
from csd.kernels.numba.jit import before_compiling
from csd.kernels.numba.threads import threads
from csd.kernels.ops import FusedOp, Ops, TextOps, reference
from csd.kernels.states.cpu.advance import advance_state
from csd.kernels.states.cpu.conv import commit_tail, tree_conv
from csd.kernels.states.cpu.delta_rule import tree_delta_rule, tree_ssm
from csd.kernels.table.cpu.insert import graph_insert
from csd.kernels.table.cpu.observe import insert_observed, observe
from csd.kernels.texts.cpu import merge, part, representatives, spread
from csd.kernels.verify.cpu.decide import decide, finish
from csd.kernels.verify.cpu.heads import log_sum
from csd.kernels.verify.cpu.path import filtered, token_logprobs, verify, verify_all

__all__ = [
    "add",
    "before_compiling",
    "by_columns",
    "by_rows",
    "fits",
    "in_loops",
    "instruction",
    "instructions",
    "multiplies",
    "ops",
    "product",
    "threads",
    "tree_attention",
]


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
        "finish": FusedOp((plain.advance_slots, plain.snapshot), finish),
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
    if dtype == torch.float32:
        # in bfloat16 PyTorch's attention of prompts is faster
        of_layers["prompt_attention"] = prompt_attention
    return replace(
        plain,
        name="cpu",
        **of_layers,
        plan_attention=plan_attention,
        tree_attention=tree_attention,
        verify=verify,
        verify_all=verify_all,
        token_logprobs=token_logprobs,
        log_sum=log_sum,
        filtered=filtered,
        commit_kv=commit_kv,
        commit_tail=commit_tail,
        roots=roots,
        node_costs=node_costs,
        prune=prune,
        draft_tree=draft_tree,
        observe=observe,
        graph_insert=graph_insert,
        texts=TextOps(representatives, merge, spread, part),
        fused=fused,
        gathers=False,
        reads_device=False,
        portable=True,
    )
