"""Properties of one attention call of a module."""

from dataclasses import dataclass

from csd.kernels.attention.reference import Properties


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Properties of a call, as `csd.models.module.probe` determines them."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # most keys that a row sees, its own included
    chunk: int | None = None  # a row sees keys with the same position // chunk
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    sinks: bool = False  # one more score per head, without a value
    shares: int | None = None  # index of an earlier call whose keys and values are used

    @property
    def width(self) -> int:
        """Numbers of a token's keys or of its values, whichever are more."""
        return self.kv_heads * max(self.head_dim, self.value_dim)

    @property
    def is_plain(self) -> bool:
        """True if the tree attention of every backend supports all of the call's properties."""
        of_positions = self.window is not None or self.chunk is not None
        of_scores = self.softcap is not None or self.sinks
        # the maximum is taken before scores are scaled, so the scale must be positive
        same = self.value_dim == self.head_dim
        return same and self.scale > 0 and not (of_positions or of_scores)

    @property
    def properties(self) -> Properties:
        return Properties(
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.scale,
            self.window,
            self.chunk,
            self.softcap,
        )

    def __str__(self) -> str:
        parts = [f"{self.heads} heads", f"{self.kv_heads} for keys", f"{self.head_dim} numbers"]
        if self.value_dim != self.head_dim:
            parts.append(f"{self.value_dim} of values")
        parts.append(f"scale {self.scale:.4g}")
        for name in ("window", "chunk", "softcap", "shares"):
            if getattr(self, name) is not None:
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join([*parts, *["sinks"] * self.sinks])
