"""Refusal of config fields that the config's class does not define and its module ignores.

A file with these fields was written by another program, for a different model. No list of their
names is complete, so a field is judged by the words in its name and by its value.
"""

from typing import Any

# parts of the names of fields that change a decoder's logits
_WORDS = (
    "activation", "alibi", "attention_chunk", "bias", "bidirectional", "causal", "clip",
    "cross_attention", "expert", "interleave", "logn", "lora_rank", "moe_", "multiplier", "mup",
    "norm", "ntk", "prefix_lm", "residual", "rope", "rotary", "scal", "shared_kv", "sink",
    "softcap", "temperature_tuning",
)  # fmt: skip
# names with these are factors, for which 1 changes nothing
_FACTORS = ("multiplier", "scal", "factor", "pct", "ratio")
_HARMLESS: dict[str, tuple] = {
    "is_causal": (True,),
    "use_rope": (True,),
    "hidden_activation": ("silu",),
    "activation_function": ("silu",),
    "norm_type": ("rmsnorm", "rms_norm"),
}
# fields that state what a family's module computes in any case
_ALWAYS: dict[str, tuple[str, ...]] = {
    "qwen2": ("attention_bias", "qkv_bias"),
    "qwen3": ("qk_norm", "use_qk_norm"),
}


def refuse_unknown_fields(config: Any, supported: str) -> None:
    """Raises ValueError, naming field and value, for a `transformers` config with such a field."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[config.model_type]().to_dict()
    for name, value in config.to_dict().items():
        if name in known or name in _ALWAYS.get(config.model_type, ()):
            continue
        if any(word in name.lower() for word in _WORDS) and not _changes_nothing(name, value):
            raise ValueError(
                f"{name}={value!r} is not supported: no {config.model_type} model of transformers "
                f"computes with it; {supported}"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if name in _HARMLESS:
        return value is None or value in _HARMLESS[name]
    # private, or an epsilon of a norm that the decoder does not have
    if name.startswith("_") or name.endswith(("_eps", "_epsilon")):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return not value
    if "expert" in name:
        return value in (0, 1)
    return value == (1 if any(word in name for word in _FACTORS) else 0)
