"""Attention of one step as a job: N samples of one prompt, each with a tree of T nodes."""

import random
from dataclasses import dataclass, fields, replace

import torch

from bench.lib.shapes import SHAPES
from csd.kernels.attention import TreeLayout
from csd.state.kv_cache import PAGE

MODELS = ("llama-3.1-8b", "qwen2.5-7b")
# samples, nodes per sample, prompt tokens, mean of the committed tokens
SIZES = (
    (4, 16, 512, 256),
    (8, 32, 2048, 1024),
    (16, 16, 2048, 4096),
    (32, 16, 8192, 1024),
    (64, 4, 2048, 1024),
    (256, 1, 512, 1024),
)


@dataclass(frozen=True, slots=True)
class JobShape:
    """Shape of one layer's attention: H query heads, K key-value heads of size D."""

    model: str
    H: int
    K: int
    D: int
    samples: int
    nodes: int
    prompt: int
    committed: int

    @property
    def rows(self) -> int:
        return self.samples * self.nodes

    def __str__(self) -> str:
        return (
            f"{self.model} N={self.samples} T={self.nodes} prompt={self.prompt} "
            f"committed={self.committed}"
        )


def shapes(full: bool = False) -> list[JobShape]:
    """Returns the twelve shapes; with `full`, all combinations of at most 1,024 rows."""
    sizes = SIZES
    if full:
        sizes = [
            (n, t, prompt, committed)
            for n in (4, 8, 16, 32, 64, 128, 256)
            for t in (1, 4, 8, 16, 32, 64)
            for prompt in (512, 2048, 8192)
            for committed in (256, 1024, 4096)
            if n * t <= 1024
        ]
    models = [(m, SHAPES[m]) for m in MODELS]
    return [JobShape(m, c.heads, c.kv_heads, c.head_dim, *z) for m, c in models for z in sizes]


@dataclass(slots=True)
class Job:
    """Arguments of `csd.kernels.tree_attention` for one group, with lengths on the host."""

    shape: JobShape
    lengths: list[int]  # committed tokens of every sample
    q: torch.Tensor  # [M, H, D]
    node_k: torch.Tensor  # [M, K, D]
    node_v: torch.Tensor  # [M, K, D]
    k_pages: torch.Tensor  # [pages, 64, K, D]
    v_pages: torch.Tensor  # [pages, 64, K, D]
    prompt_pages: torch.Tensor  # [1, PP] int32
    prompt_len: torch.Tensor  # [1] int32
    slot_pages: torch.Tensor  # [N, SP] int32
    slot_len: torch.Tensor  # [N] int32
    slot: torch.Tensor  # [M] int32
    ancestors: torch.Tensor  # [M] int64
    slot_start: torch.Tensor  # [N] int32
    slot_nodes: torch.Tensor  # [N] int32
    group_start: torch.Tensor  # [2] int32

    @property
    def arguments(self) -> dict:
        names = [f.name for f in fields(self)][2:]
        return {name: getattr(self, name) for name in names} | {"scale": self.shape.D**-0.5}

    @property
    def layout(self) -> TreeLayout:
        return TreeLayout(*(getattr(self, name) for name in TreeLayout._fields))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, each counted once."""
        s = self.shape
        tokens = s.prompt + sum(self.lengths) + s.rows
        return 2 * tokens * s.K * s.D * self.q.element_size()

    @property
    def moved_bytes(self) -> int:
        """Least bytes that a layer can move: keys and values once, queries in, results out."""
        return self.kv_bytes + 2 * self.q.numel() * self.q.element_size()

    def copy(self) -> "Job":
        """Copy of the job with its own queries, keys and values; other tensors are shared."""
        names = ("q", "node_k", "node_v", "k_pages", "v_pages")
        return replace(self, **{name: getattr(self, name).clone() for name in names})

    def to(self, dtype: torch.dtype) -> "Job":
        names = ("q", "node_k", "node_v", "k_pages", "v_pages")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def make(shape: JobShape, device="cpu", dtype=torch.bfloat16, seed: int = 0) -> Job:
    """Returns a random job: ragged samples with lengths of the given mean and random trees."""
    rng = random.Random(seed)
    N, T, mean = shape.samples, shape.nodes, shape.committed
    # evenly spaced from 0.5 to 1.5 times the mean
    lengths = [mean // 2 + (mean * i) // max(N - 1, 1) for i in range(N)] if N > 1 else [mean]
    rng.shuffle(lengths)
    counts = [-(-n // PAGE) for n in (shape.prompt, *lengths)]
    first = [sum(counts[:i]) for i in range(len(counts))]

    def table(rows: range) -> list[list[int]]:
        width = max(1, *(counts[i] for i in rows))
        return [[first[i] + j if j < counts[i] else -1 for j in range(width)] for i in rows]

    def int32(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    pages, M = sum(counts), shape.rows
    return Job(
        shape=shape,
        lengths=lengths,
        # scaled so that some keys have more weight than others
        q=2 * normal(M, shape.H, shape.D),
        node_k=normal(M, shape.K, shape.D),
        node_v=normal(M, shape.K, shape.D),
        k_pages=normal(pages, PAGE, shape.K, shape.D),
        v_pages=normal(pages, PAGE, shape.K, shape.D),
        prompt_pages=int32(table(range(1))),
        prompt_len=int32([shape.prompt]),
        slot_pages=int32(table(range(1, N + 1))),
        slot_len=int32(lengths),
        slot=int32([s for s in range(N) for _ in range(T)]),
        ancestors=torch.tensor([w for _ in range(N) for w in _tree(T, rng)], device=device),
        slot_start=int32([s * T for s in range(N)]),
        slot_nodes=int32([T] * N),
        group_start=int32([0, M]),
    )


def _tree(nodes: int, rng: random.Random) -> list[int]:
    """Ancestor bit masks of a random tree, as int64."""
    words = [1]
    for j in range(1, nodes):
        words.append(words[rng.randrange(j)] | 1 << j)
    return [w - (1 << 64) if w >> 63 else w for w in words]


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS of the error over the RMS of the exact result; infinite for NaN."""
    error = (
        got.double() - exact.double()
    ).square().mean().sqrt() / exact.double().square().mean().sqrt()
    return error.nan_to_num(nan=float("inf")).item()


def limit_for(dtype: torch.dtype) -> float:
    """Allowed relative error: two roundings to the dtype, or float32 summation."""
    return max(2 * torch.finfo(dtype).eps, 1e-5)
