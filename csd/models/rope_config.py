"""Rotary embeddings that the fused decoder computes, from a `transformers` config."""

import math
from typing import Any

_LLAMA3 = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
# rope types, and what each reads; a context that was extended is no part of the default's
_ROPE = {
    "default": _LLAMA3[-1:],
    "llama3": _LLAMA3,
    "linear": ("factor", _LLAMA3[-1]),
    "yarn": (
        "factor", _LLAMA3[-1], "attention_factor", "mscale", "mscale_all_dim", "beta_fast",
        "beta_slow", "truncate",
    ),
}  # fmt: skip


# of a rotary embedding of a part of each head; a text's positions are the same in all sections
_PARTIAL = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")


def rotary_dim(config: Any) -> int | None:
    """Numbers of a head that are rotated, None for all."""
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    found = int(config.head_dim * (1 if share is None else share))
    return None if found == config.head_dim else found


def rope_of(config: Any, partial: bool = False) -> tuple[float, tuple | None, str, float]:
    """theta, the factors of llama3, kind, and what cosines and sines are multiplied by.

    partial: whether a part of a head may be rotated.

    Raises ValueError for another kind and for a field that csd does not compute with.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_type" not in rope or "rope_theta" not in rope:
        raise ValueError(
            f"rope_parameters need rope_type and rope_theta for all layers, got {rope}"
        )
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in _ROPE:
        known = ", ".join(map(repr, _ROPE))
        raise ValueError(f"rope type {kind!r} is not supported, only {known}")
    if partial:
        rope = {name: value for name, value in rope.items() if name not in _PARTIAL}
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", *_ROPE[kind]}):
        if rope[name] not in (None, 1):
            raise ValueError(
                f"rope_parameters with {name}={rope[name]!r} are not supported for {kind!r}"
            )
    attention = _yarn_attention(rope) if kind == "yarn" else 1.0
    if kind != "llama3":
        return theta, None, kind, attention
    factor, low, high, old = (rope[name] for name in _LLAMA3)
    return theta, (float(factor), float(low), float(high), int(old)), "default", attention


def _yarn_attention(rope: dict) -> float:
    """Factor of cosines and sines in YaRN."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def of(weight: float) -> float:
        factor = rope["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(of(both[0]) / of(both[1])) if both[0] and both[1] else of(1)
