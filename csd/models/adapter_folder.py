"""Folders that hold only a peft adapter, as `PeftModel.save_pretrained` writes them."""

import json
import os
from typing import Any

from csd.schema.lazy import check_installed

FILE = "adapter_config.json"


def base_name(name: str) -> str | None:
    """Base model that the adapter in folder `name` names; None if it is not an adapter folder.

    Raises ValueError for an adapter that names no base model.
    """
    path = os.path.join(name, FILE)
    # if the folder also holds a model, the adapter's base is ambiguous
    if not os.path.exists(path) or os.path.exists(os.path.join(name, "config.json")):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not the config of an adapter: {error}") from error
    if not base or not isinstance(base, str):
        raise ValueError(
            f"{path} must name its base model (base_model_name_or_path), got {base!r}; load both "
            "with peft, and pass the model"
        )
    return base


def with_adapter(model: Any, folder: str) -> Any:
    """`model` wrapped in a PeftModel with the folder's adapter, unmerged, in evaluation mode."""
    check_installed("peft", "lora", f"the adapter in {folder}")
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, folder).eval()
    # peft passes on any exception of its file readers
    except Exception as error:
        raise ValueError(f"the adapter in {folder} cannot be loaded: {error}") from error
