"""Sizes of the models that kernels are compiled for."""

from dataclasses import dataclass

from bench.lib import shapes
from csd.models.fused.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that kernels are specialised on."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, name: str, c: ModelConfig) -> "Shape":
        sizes = c.heads, c.kv_heads, c.head_dim, c.hidden, c.intermediate, c.layers, c.vocab
        return cls(name, *sizes)


# the first two are benchmarked on a GPU
SHAPES = tuple(
    Shape.of(name, shapes.SHAPES[name]) for name in ("llama-3.1-8b", "qwen2.5-7b", "smollm2-135m")
)
# head sizes of models that are not benchmarked
OTHER_SHAPES = (
    Shape("head-96", 32, 32, 96, 3072, 8192, 32, 32064),
    Shape("head-256", 16, 8, 256, 3584, 14336, 42, 256000),
)
