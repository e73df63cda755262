"""Rotary embeddings of the fused decoder: from a `transformers` config to cosines and sines.

w_j = theta^(-2 j / R);   llama3 divides low frequencies by a factor and blends in between,
and yarn also multiplies cosines and sines by a constant
"""

import math
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

_OLD = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _OLD)
_OF_YARN = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
# rope types -> their fields; the default type ignores the original context
_ROPE = {
    "default": (_OLD,),
    "llama3": _LLAMA3,
    "linear": ("factor", _OLD),
    "yarn": ("factor", _OLD, "attention_factor", *_OF_YARN),
    "longrope": ("factor", _OLD, "attention_factor", "short_factor", "long_factor"),
}
# positions of a table that are computed at once; fewer in float64, whose steps run in the cache
AT_ONCE, IN_CACHE = 4096, 128
# pi / 2 as a sum, the first two of which have 33 bits, so that their products with n are exact
HALF_PI = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
# Taylor's coefficients of sin x / x - 1 and of cos x - 1 in x^2, the highest power first
SINE, COSINE = (
    [(-1) ** n / math.factorial(2 * n + odd) for n in range(6, 0, -1)] for odd in (1, 0)
)
# fields of these families' rotary embeddings: the part of a head that is rotated, and sections of
# positions in images, which are all the same in a text
_OF_FAMILY = {
    "phi3": ("partial_rotary_factor",),
    "qwen3_5_text": ("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
}
# kinds of layers for which a config of these families may have separate rotary embeddings
FULL, LOCAL = "full_attention", "sliding_attention"
_BY_KIND = ("gemma3_text", "olmo3")


class Rope(NamedTuple):
    """Parameters of a rotary embedding."""

    theta: float
    scaling: tuple[float, float, float, int] | None  # llama3: factor, low, high, old
    kind: str  # frequencies of types other than default and llama3 are the module's
    attention: float  # factor of cosines and sines


def ropes_of(config: Any) -> tuple[Rope, Rope | None]:
    """Rotary embedding of a model, and a second one of its layers with a window, or None.

    Raises ValueError for another type and for a field that csd does not compute with.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    for name in _OF_FAMILY.get(config.model_type, ()):
        parameters.pop(name, None)
    if config.model_type not in _BY_KIND or not parameters.keys() & {FULL, LOCAL}:
        return _rope(parameters, config), None
    # only for kinds of layers that the model has
    kinds = [kind for kind in (FULL, LOCAL) if kind in config.layer_types]
    both = [_rope(dict(parameters[kind]), config) for kind in kinds]
    return both[0], both[1] if len(both) == 2 else None


# rope types that extend a context by their factor
_EXTENDING = ("linear", "yarn", "llama3")


def context_of(config: Any) -> int | None:
    """Number of positions of a model, of its text config; None if the config names none.

    A rope scaling extends `max_position_embeddings` by its factor where the config leaves that at
    the length before the scaling. LongRoPE rotates all tokens of longer texts by other frequencies;
    its context ends before these.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        return int(positions)
    # one for all layers, or one per kind of layer
    by_kind = [rope for rope in parameters.values() if isinstance(rope, dict)]
    context = int(positions)
    for rope in by_kind or [parameters]:
        kind, old = rope.get("rope_type"), rope.get(_OLD)
        if kind == "longrope" and old:
            return min(int(positions), int(old))
        # a linear scaling has no field for the old length. For all layers, it is the config's
        # maximum, as transformers documents; by kind of layer (Gemma 3), that is the new one
        if kind == "linear" and old is None and not by_kind:
            old = positions
        if kind in _EXTENDING and old == positions:
            context = max(context, int(old * float(rope.get("factor") or 1)))
    return context


def _rope(rope: dict, config: Any) -> Rope:
    if "rope_type" not in rope or "rope_theta" not in rope:
        raise ValueError(
            f"rope_parameters need rope_type and rope_theta for all layers, got {rope}"
        )
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in _ROPE:
        known = ", ".join(map(repr, _ROPE))
        raise ValueError(f"rope type {kind!r} is not supported, only {known}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    for name in sorted(rope.keys() - {"rope_type", "type", "rope_theta", *_ROPE[kind]}):
        if rope[name] not in (None, 1):
            raise ValueError(
                f"rope_parameters with {name}={rope[name]!r} are not supported for {kind!r}"
            )
    attention = 1.0
    if rope.get("attention_factor") is not None:
        attention = float(rope["attention_factor"])
    elif kind == "yarn":
        attention = _yarn_attention(rope)
    elif kind == "longrope":
        attention = _long_attention(rope, config.max_position_embeddings)
    if kind != "llama3":
        return Rope(theta, None, kind, attention)
    factor, low, high, old = (rope[name] for name in _LLAMA3)
    return Rope(theta, (float(factor), float(low), float(high), int(old)), "default", attention)


def _long_attention(rope: dict, positions: int) -> float:
    """Factor of cosines and sines in LongRoPE, the same below and above its border."""
    old = rope[_OLD]
    factor = positions / old if rope.get("factor") is None else rope["factor"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))


def _yarn_attention(rope: dict) -> float:
    """Factor of cosines and sines in YaRN."""

    def of(weight: float) -> float:
        factor = rope["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(of(both[0]) / of(both[1])) if both[0] and both[1] else of(1)


def rope_tables(
    rope: Rope,
    dims: int,  # R
    positions: int,
    dtype: torch.dtype,
    device: str | torch.device,
    frequencies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [positions, R]: of angles in float32 as transformers has them, then cast.

    In float32 on a CPU they have the same bits on every machine.
    """
    w = default_frequencies(rope, dims) if frequencies is None else frequencies
    w = w.to(device, torch.float32)
    cos, sin = (torch.empty(positions, 2, len(w), dtype=dtype, device=device) for _ in range(2))
    own = dtype == torch.float32 and cos.is_cpu
    if own and frequencies is not None and rope.kind == "default":
        # a module's powers may differ in the last bit, by the library that computed them
        correct = default_frequencies(rope, dims)
        w = correct if torch.allclose(w, correct, rtol=1e-6, atol=0) else w
    # in parts: of a long context, what is computed on the way takes more memory than the tables
    at_once = IN_CACHE if own else AT_ONCE
    for first in range(0, positions, at_once):
        part = slice(first, min(first + at_once, positions))
        position = torch.arange(part.start, part.stop, dtype=torch.float32, device=device)
        angle = position[:, None, None] * w
        of_angle = _cos_sin(angle) if own else (angle.cos(), angle.sin())
        for table, values in zip((cos, sin), of_angle, strict=True):
            table[part] = values * rope.attention
    return cos.flatten(1), sin.flatten(1)


def _cos_sin(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of angles, float32, up to 2^20: correctly rounded but for one in 10^5.

    A library's differ between versions and between vectors' widths. Here each operation on float64
    has one correct result: the angle less the nearest multiple n of pi / 2, then Taylor's series.
    """
    x = angle.double()
    n = (x * (2 / math.pi)).round_()
    for part in HALF_PI:
        x -= n * part
    z = x * x
    series = []
    for factors in (SINE, COSINE):
        y = z * factors[0]
        for factor in factors[1:]:
            y += factor
            y *= z
        series.append(y + 1)
    sine, cosine = series[0] * x, series[1]
    n = n.long()
    swapped = (n & 1).bool()
    # n mod 4 turns (cos, sin) to (-sin, cos), (-cos, -sin) and (sin, -cos)
    cos, sin = torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)
    cos *= 1 - ((n + 1) & 2)
    sin *= 1 - (n & 2)
    return cos.float(), sin.float()


def default_frequencies(rope: Rope, dims: int) -> torch.Tensor:
    if rope.kind != "default":
        raise ValueError(f"rope type {rope.kind!r} needs the frequencies of a module")
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    # in decimals, whose powers are correctly rounded on every machine
    theta = Decimal(rope.theta)
    w = 1.0 / torch.tensor([float(theta ** Decimal(x)) for x in exponents.tolist()])
    if rope.scaling is None:
        return w
    factor, low, high, old_context = rope.scaling
    wavelength = 2 * math.pi / w
    # 1 above the high frequency bound, 0 below the low one
    blend = ((old_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * w / factor + blend * w
