"""The needs of one attention call of a module, and the place of its keys."""

from dataclasses import dataclass

from csd.kernels.tree_attention.properties import Properties


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Properties of a call, as `csd.models.probe` finds them."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # keys that a row sees at most, its own included
    chunk: int | None = None  # a row sees keys whose position // chunk is its own
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    sinks: bool = False  # one more score a head, without a value
    shares: int | None = None  # the earlier call whose keys and values it attends to

    @property
    def width(self) -> int:
        """Numbers of a token's keys, or of its values where they are more."""
        return self.kv_heads * max(self.head_dim, self.value_dim)

    @property
    def is_plain(self) -> bool:
        """True if every backend's tree attention has all of its properties."""
        of_positions = self.window is not None or self.chunk is not None
        of_scores = self.softcap is not None or self.sinks
        # the largest score is found before it is scaled
        same = self.value_dim == self.head_dim
        return same and self.scale > 0 and not (of_positions or of_scores)

    @property
    def properties(self) -> Properties:
        return Properties(
            self.kv_heads, self.head_dim, self.value_dim, self.scale, self.window, self.chunk,
            self.softcap,
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{self.heads} heads", f"{self.kv_heads} for keys", f"{self.head_dim} numbers"]
        if self.value_dim != self.head_dim:
            parts.append(f"{self.value_dim} of values")
        parts.append(f"scale {self.scale:.4g}")
        for name in ("window", "chunk", "softcap", "shares"):
            if getattr(self, name) is not None:
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join([*parts, *["sinks"] * self.sinks])
