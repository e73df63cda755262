"""The operations of a step in one implementation: the references or the Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ops:
    name: str
    rms_norm: Callable
    rotary: Callable
    swiglu: Callable
    plan_attention: Callable
    tree_attention: Callable
    verify: Callable
    commit_kv: Callable
    advance_slots: Callable
    draft_tree: Callable
    observe: Callable
    graph_insert: Callable
    snapshot: Callable

    @classmethod
    def choose(cls, kernels: str | None, device: torch.device) -> "Ops":
        """`kernels` "reference" or "triton"; None takes the one that fits the device."""
        if kernels is None:
            kernels = "triton" if device.type == "cuda" else "reference"
        if kernels not in ("reference", "triton"):
            raise ValueError(f"kernels must be 'reference' or 'triton', got {kernels!r}")
        return reference() if kernels == "reference" else triton()


def reference() -> Ops:
    from csd.kernels.advance import advance_slots_ref
    from csd.kernels.commit import commit_kv_ref
    from csd.kernels.draft_tree import draft_tree_ref
    from csd.kernels.graph_insert import graph_insert_ref
    from csd.kernels.observe import observe_ref
    from csd.kernels.rms_norm import rms_norm_ref
    from csd.kernels.rotary import rotary_ref
    from csd.kernels.snapshot import snapshot_ref
    from csd.kernels.swiglu import swiglu_ref
    from csd.kernels.tree_attention_ref import host_work, tree_attention_ref
    from csd.kernels.verify import verify_ref

    def plan(heads: int, kv_heads: int, **where: torch.Tensor) -> Any:
        # the reference needs no head counts
        return host_work(**where)

    return Ops(
        name="reference",
        rms_norm=rms_norm_ref,
        rotary=rotary_ref,
        swiglu=swiglu_ref,
        plan_attention=plan,
        tree_attention=tree_attention_ref,
        verify=verify_ref,
        commit_kv=commit_kv_ref,
        advance_slots=advance_slots_ref,
        draft_tree=draft_tree_ref,
        observe=observe_ref,
        graph_insert=graph_insert_ref,
        snapshot=snapshot_ref,
    )


def triton() -> Ops:
    from csd.kernels.advance import advance_slots_triton
    from csd.kernels.attention_plan import plan_attention_triton
    from csd.kernels.commit import commit_kv_triton
    from csd.kernels.draft_tree import draft_tree_triton
    from csd.kernels.graph_insert import graph_insert_triton
    from csd.kernels.observe import observe_triton
    from csd.kernels.rms_norm import rms_norm_triton
    from csd.kernels.rotary import rotary_triton
    from csd.kernels.snapshot import snapshot_triton
    from csd.kernels.swiglu import swiglu_triton
    from csd.kernels.tree_attention import tree_attention_triton
    from csd.kernels.verify import verify_triton

    return Ops(
        name="triton",
        rms_norm=rms_norm_triton,
        rotary=rotary_triton,
        swiglu=swiglu_triton,
        plan_attention=planned_by(plan_attention_triton),
        tree_attention=tree_attention_triton,
        verify=verify_triton,
        commit_kv=commit_kv_triton,
        advance_slots=advance_slots_triton,
        draft_tree=draft_tree_triton,
        observe=observe_triton,
        graph_insert=graph_insert_triton,
        snapshot=snapshot_triton,
    )


def planned_by(plan_attention: Callable) -> Callable:
    """What a step calls: a plan needs neither pages nor ancestors."""

    def plan(
        prompt_pages: torch.Tensor,
        slot_pages: torch.Tensor,
        ancestors: torch.Tensor,
        **needed: Any,
    ) -> Any:
        return plan_attention(**needed)

    return plan
