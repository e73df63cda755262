"""The text model inside a checkpoint that also reads images, and the model inside wrappers."""

import copy
from typing import Any

# families whose text model computes, without an image, what the whole model does
FAMILIES = ("gemma3", "internvl", "llama4", "llava", "mistral3")
# names of the text model's weights in the whole model -> in the text model
TEXT_KEYS = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
# words in the names of the other parts
_PARTS = ("vision", "visual", "image", "audio", "multi_modal", "projector")


def text_config_of(config: Any) -> Any:
    """Config of the text model of a whole model; any other config is returned as it is."""
    if config.model_type not in FAMILIES:
        return config
    text = copy.deepcopy(config.get_text_config())
    # fields that the whole model has once for all of its parts
    text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    if text.dtype is None:
        text.dtype = config.dtype
    return text


def is_of_other_part(key: str) -> bool:
    """True if a weight of the whole model is of another part than the text model."""
    return any(word in part for part in key.split(".")[:2] for word in _PARTS)


def advice(config: Any) -> str:
    """Remedy for a whole model, as the end of an error."""
    if config.model_type in FAMILIES:
        return (
            "pass the folder or hub name of its checkpoint (of a model in memory, after "
            "model.save_pretrained), from which csd loads the text model"
        )
    return f"it loads the text models of {', '.join(FAMILIES)} from such checkpoints, not this one"


# packages whose wrappers with a child `module` compute what that child computes
_PACKAGES = ("torch", "deepspeed")


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, data parallelism and weight averages."""
    while isinstance(children := getattr(model, "_modules", None), dict):
        package = type(model).__module__.partition(".")[0]
        inner = children.get("module") if package in _PACKAGES else None
        inner = children.get("_orig_mod", inner)
        if inner is None:
            break
        model = inner
    return model
