"""A Llama-like decoder whose matrices are spread over a mesh by PyTorch's tensor parallel plan.

Queries, keys, values, gate, up and head are split by column, output, down and embedding by row
(`ColwiseParallel`, `RowwiseParallel` of `torch.distributed.tensor.parallel`). A rank computes H / W
of the query heads and caches K / W of the key and value heads; the logits are gathered, and the
same on every rank. Between its two all-reduces a layer uses the local shards without DTensor's
dispatch, which takes longer than the arithmetic of a small step.

Megatron-LM's split: Shoeybi et al., arXiv 1909.08053.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from csd.integrations.tensor_parallel.link import Exchange, Link
from csd.kernels.ops import Ops
from csd.models.fused.config import ModelConfig, properties_of
from csd.models.fused.decoder import Norms
from csd.models.fused.fusable import checked_config
from csd.models.fused.linear import linear
from csd.models.fused.rope import rope_tables
from csd.models.lora import tuner_layers

# differences from Llama that cannot be split, or whose split is not implemented
_UNSPLIT: tuple[tuple[str, Callable[[ModelConfig], Any]], ...] = (
    ("one matrix of queries, keys and values", lambda c: c.joined),
    ("norms over all heads at once", lambda c: c.whole_qk_norm),
    ("layers with a state", lambda c: c.delta),
    ("norms of 1 + weight", lambda c: c.plus_one),
    ("experts", lambda c: c.experts),
)


class ParallelDecoder(Norms):
    """A `csd.models.fused.decoder.Decoder` over the ranks of `mesh`.

    model: a whole `transformers` model, the same on every rank. Its matrices become DTensors, in
        place, on the mesh's device.
    link: runs the collectives of a pass.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, link: Link):
        whole = checked_config(model)
        for what, has in _UNSPLIT:
            if has(whole):
                raise ValueError(
                    f"{whole.family} models cannot be split over ranks, because of {what}; "
                    "supported are Llama, Mistral, Qwen2, dense Qwen3, SmolLM3 and Granite models"
                )
        if tuner_layers(model.modules()):
            raise TypeError(
                "a model with adapters cannot be split over ranks; pass model.merge_and_unload()"
            )
        ranks = mesh.size()
        for name in ("heads", "kv_heads", "intermediate"):
            if getattr(whole, name) % ranks:
                raise ValueError(
                    f"{name}={getattr(whole, name)} cannot be divided evenly among {ranks} ranks"
                )
        parallelize_module(model, mesh, _plan())
        model.to(link.device)
        # attention and the caches have the rank's own heads only
        self.config = replace(whole, heads=whole.heads // ranks, kv_heads=whole.kv_heads // ranks)
        self._model, self._link = model, link
        inner = model.model
        self._layers = [_Shards.of(layer) for layer in inner.layers]
        self.norm = inner.norm.weight.data
        self.cos, self.sin = rope_tables(
            whole.rope,
            whole.head_dim,
            whole.context,
            self.norm.dtype,
            self.norm.device,
            inner.rotary_emb.inv_freq,
        )

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Callable,
        node_k: torch.Tensor,  # [L, M, K / W, D], written
        node_v: torch.Tensor,  # [L, M, K / W, D], written
        ops: Ops,
    ) -> torch.Tensor:
        """Returns hidden states [M, hidden] after the last norm, the same on every rank."""
        c, M = self.config, token.shape[0]
        x, residual = self._link.exchange(lambda: self._embed(token.clamp(min=0))), None
        if c.embedding_scale != 1:
            x = x * c.embedding_scale
        nowhere = torch.zeros_like(position)
        for i, w in enumerate(self._layers):
            x, residual = self._normed(ops, x, w.input_norm, residual)
            q, k, v = (linear(x, *shard).view(M, -1, c.head_dim) for shard in w.qkv)
            if c.qk_norm:
                q, _ = ops.rms_norm(q, w.q_norm, c.norm_eps)
                k, _ = ops.rms_norm(k, w.k_norm, c.norm_eps)
            positions = position if c.rotated is None or c.rotated[i] else nowhere
            q = ops.rotary(q, k, v, positions, self.cos, self.sin, node_k[i], node_v[i])
            attended = attend(i, q, **properties_of(c, i)).reshape(M, c.heads * c.head_dim)
            x = self._left(ops, self._sum(linear(attended, *w.out)))
            x, residual = self._normed(ops, x, w.post_norm, residual)
            gate_up = torch.cat([linear(x, *shard) for shard in w.gate_up], dim=-1)
            x = self._left(ops, self._sum(linear(ops.swiglu(gate_up), *w.down)))
        return ops.rms_norm(x, self.norm, c.norm_eps, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden states [R, hidden], the same on every rank."""
        values, divisor = self._link.exchange(lambda: self._head(hidden)), self.config.logit_divisor
        return values if divisor == 1 else values / divisor

    def exchanges(self, rows: int, head: bool) -> list[Exchange]:
        """The collectives of a pass over `rows` rows, on zeros, for a rank that has failed.

        head: True if the pass computes logits.
        """
        device, dtype = self.norm.device, self.norm.dtype

        def zeros() -> torch.Tensor:
            return torch.zeros(rows, self.norm.shape[0], dtype=dtype, device=device)

        def embed() -> torch.Tensor:
            return self._embed(torch.zeros(rows, dtype=torch.int32, device=device))

        sums: list[Exchange] = [lambda: self._reduce(zeros())] * (2 * len(self._layers))
        last: list[Exchange] = [lambda: self._head(zeros())] if head else []
        return [embed, *sums, *last]

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._link.exchange(lambda: self._reduce(x))

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._link.group)
        return x

    @torch.no_grad()
    def _embed(self, token: torch.Tensor) -> torch.Tensor:
        return _arrived(self._model.model.embed_tokens(token))

    @torch.no_grad()
    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return _arrived(self._model.lm_head(hidden))


def _arrived(x: torch.Tensor) -> torch.Tensor:
    """Wait for a collective and return its tensor, whose address CPU loops read.

    On a GPU the stream waits, not the host.
    """
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


@dataclass(slots=True)
class _Shards:
    """A rank's shards of a layer's weights: (matrix, bias) tuples, views of the DTensors."""

    input_norm: torch.Tensor  # [hidden]
    # of queries [H D / W, hidden], [H D / W] or None; of keys and values with K in place of H
    qkv: list[tuple]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    out: tuple  # [hidden, H D / W]
    post_norm: torch.Tensor
    gate_up: list[tuple]  # [F / W, hidden] twice
    down: tuple  # [hidden, F / W]

    @classmethod
    def of(cls, layer: Any) -> "_Shards":
        a, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=layer.input_layernorm.weight.data,
            qkv=[*map(_local, (a.q_proj, a.k_proj, a.v_proj))],
            q_norm=a.q_norm.weight.data if hasattr(a, "q_norm") else None,
            k_norm=a.k_norm.weight.data if hasattr(a, "k_norm") else None,
            out=_local(a.o_proj),
            post_norm=layer.post_attention_layernorm.weight.data,
            gate_up=[*map(_local, (mlp.gate_proj, mlp.up_proj))],
            down=_local(mlp.down_proj),
        )


def _local(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if linear.bias is None else linear.bias.data.to_local()
    return linear.weight.data.to_local(), bias


def _plan() -> dict[str, ParallelStyle]:
    by_column = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
    by_row = "self_attn.o_proj mlp.down_proj"
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.{name}": ColwiseParallel() for name in by_column.split()},
        **{f"model.layers.*.{name}": RowwiseParallel() for name in by_row.split()},
    }
