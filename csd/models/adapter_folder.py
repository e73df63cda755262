"""A folder with an adapter of peft alone, as `PeftModel.save_pretrained` writes it."""

import json
import os
from typing import Any

from csd.schema.lazy import check_installed

FILE = "adapter_config.json"


def base_name(name: str) -> str | None:
    """The base model that a folder's adapter names; None of what is no such folder.

    Raises ValueError for an adapter that names none.
    """
    path = os.path.join(name, FILE)
    # beside a model in the same folder, its base is ambiguous
    if not os.path.exists(path) or os.path.exists(os.path.join(name, "config.json")):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not an adapter's config: {error}") from error
    if not base or not isinstance(base, str):
        raise ValueError(
            f"{path} must name its base model (base_model_name_or_path), got {base!r}; load both "
            "with peft, and pass the model"
        )
    return base


def with_adapter(model: Any, folder: str) -> Any:
    """The model within a PeftModel that has the folder's adapter, unmerged."""
    check_installed("peft", "lora", f"the adapter in {folder}")
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, folder).eval()
    # peft raises what its readers raise
    except Exception as error:
        raise ValueError(f"the adapter in {folder} cannot be loaded: {error}") from error
