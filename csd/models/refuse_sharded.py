"""Refusal of models without complete local weights: sharded, on other devices, not loaded."""

from typing import Any

from torch import nn


def refuse_sharded(model: Any) -> None:
    """Raises TypeError for a model in FSDP, which shards it."""
    kinds = {c.__name__ for m in [model, *model.modules()] for c in type(m).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise TypeError(
            "an FSDP model has sharded weights; gather them "
            "(FullyShardedDataParallel.summon_full_params, or a full state dict) into a plain "
            "model"
        )


def refuse_absent(name: str, param: nn.Parameter) -> None:
    """Raises TypeError for a weight without plain local data."""
    if param.is_meta:
        raise TypeError(
            f"{name} has no data here (offloaded or not loaded); load the whole model on one device"
        )
    if hasattr(param, "ds_id"):
        raise TypeError(f"{name} is a shard of DeepSpeed ZeRO-3; use ZeRO-2 or less, or DDP")
    if type(param.data).__name__ == "DTensor":
        raise TypeError(f"{name} is a DTensor; pass a model with plain local weights")
