"""EAGLE-1, 2 and 3 draft heads, from their published files.

A head reads token t[i] with the target's hidden state f[i-1] of the token before it, and predicts
the next state f[i], and from it the token t[i+1]. Drafted tokens are read with predicted states. E
embeds tokens, [a, b] concatenates features.

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858; the same files): f is the target's last hidden state
after its norm, and the layer is Llama's without its first norm. The target's own head gives the
logits.

    x = fc [E t[i], f[i-1]] (+ bias),   x = x + attention(x),   f[i] = x + mlp(norm(x))

EAGLE-3 (arXiv 2503.01840): f joins the inputs of three layers of the target, a low one, the middle
and a high one (2, L // 2 and L - 3 of L), and fc brings them to the head's width. The head has a
vocabulary of its own: draft token j is the target's j + d2t[j].

    h = fc f[i-1], or the h predicted before,   x = h + attention([norm(E t[i]), norm(h)])
    h' = x + mlp(norm(x)),                    logits = lm_head norm(h')
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from csd.kernels.ops import Ops
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder
from csd.models.fused.linear import linear
from csd.models.fused.rope import rope_tables
from csd.research.draft_models.cache import DraftNetwork
from csd.research.draft_models.draft_model import NetworkSpec
from csd.utils.files import check_regular, read_file

# with 4 layers, layers 2 and L - 3 exist; with 4 or 5, some of the three layers are the same
FEWEST = 4


def read_layers(layers: int) -> tuple[int, int, int]:
    """Layers 2, L // 2 and L - 3 of L, which published heads read, in the order of fc's input."""
    return 2, layers // 2, layers - 3


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class EagleHead(DraftNetwork):
    """EAGLE head; weights by their published names."""

    wants_hidden = True

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], name: str = "the head"
    ):
        self.version = 3 if "midlayer.hidden_norm.weight" in weights else 1
        self.layer = "midlayer" if self.version == 3 else "layers.0"
        self.config, self.weights, self.name = replace(config, layers=1), weights, name
        self._check()
        wide = weights["fc.weight"].shape[1]
        self.state_width = wide if self.version == 3 else wide - config.hidden
        self.dtype, self.device = weights["fc.weight"].dtype, weights["fc.weight"].device
        self.cos, self.sin = rope_tables(
            config.rope, config.head_dim, config.context, self.dtype, self.device
        )
        self.qkv = torch.cat([self._of(f"{x}.weight") for x in _ATTENTION])
        biased = f"{self.layer}.{_ATTENTION[0]}.bias" in weights
        self.qkv_bias = torch.cat([self._of(f"{x}.bias") for x in _ATTENTION]) if biased else None
        self.gate_up = torch.cat([self._of(f"mlp.{x}_proj.weight") for x in ("gate", "up")])
        self.embedding: torch.Tensor | None = weights.get("embed_tokens.weight")
        # the target's token id for each token of the head
        self.token: torch.Tensor | None = None
        if "d2t" in weights:
            offset = weights["d2t"].long()
            self.token = offset + torch.arange(offset.shape[0], device=offset.device)
        self.target: Any = None

    def _of(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.layer}.{name}"]

    def _check(self) -> None:
        """Raises ValueError unless all weights exist and have matching shapes."""
        c = self.config
        wide = 2 * c.hidden if self.version == 3 else c.hidden
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes: dict[str, tuple[int | None, ...]] = {
            "fc.weight": (c.hidden, None if self.version == 3 else 2 * c.hidden)
        }
        inside = {
            "self_attn.q_proj": (q, wide),
            "self_attn.k_proj": (kv, wide),
            "self_attn.v_proj": (kv, wide),
            "self_attn.o_proj": (c.hidden, q),
            "mlp.gate_proj": (c.intermediate, c.hidden),
            "mlp.up_proj": (c.intermediate, c.hidden),
            "mlp.down_proj": (c.hidden, c.intermediate),
            "post_attention_layernorm": (c.hidden,),
        }
        if self.version == 3:
            inside |= dict.fromkeys(("hidden_norm", "input_layernorm"), (c.hidden,))
            shapes |= {"norm.weight": (c.hidden,), "lm_head.weight": (None, c.hidden)}
        shapes |= {f"{self.layer}.{name}.weight": shape for name, shape in inside.items()}
        for name, shape in shapes.items():
            weight = self.weights.get(name)
            if weight is None:
                raise ValueError(f"{self.name} has no weights {name!r}: it is not an EAGLE head")
            fits = weight.ndim == len(shape) and all(
                want in (None, n) for want, n in zip(shape, weight.shape, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"{self.name} must have {name!r} of shape {shape}, got {tuple(weight.shape)}"
                )

    def attach(self, decoder: Any) -> None:
        """Attach to the target, whose embedding, head and hidden states the head may use."""
        if not isinstance(decoder, Decoder):
            raise TypeError(f"an EAGLE head needs a csd Decoder, got {type(decoder).__name__}")
        width = decoder.config.hidden
        if self.state_width != (3 * width if self.version == 3 else width):
            raise ValueError(
                f"{self.name} was made for another hidden size than the model's {width}"
            )
        self.target = decoder
        if self.embedding is None:
            self.embedding = decoder.embedding
        if self.version == 3:
            layers = decoder.config.layers
            if layers < FEWEST:
                raise ValueError(
                    f"{self.name} needs a model of at least {FEWEST} layers, got {layers}"
                )
            decoder.taps = read_layers(layers)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Select the head's input from the target's last forward pass."""
        if self.version == 1:
            return hidden
        by_layer = self.target.tapped
        return torch.cat([by_layer[i] for i in self.target.taps], -1)

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,
        position: torch.Tensor,
        hidden: torch.Tensor | None,
        attend: Any,
        node_k: torch.Tensor,
        node_v: torch.Tensor,
        ops: Ops,
    ) -> torch.Tensor:
        """Predict states [M, hidden]; hidden: the target's states, or predicted ones of parents."""
        assert hidden is not None and self.embedding is not None
        c, eps, w = self.config, self.config.norm_eps, self.weights
        # clamp positions beyond the context, of nodes that no slot has room for
        position = position.clamp(max=c.context - 1)
        e, f = F.embedding(token, self.embedding).to(self.dtype), hidden.to(self.dtype)
        if self.version == 1:
            x = residual = linear(torch.cat([e, f], -1), w["fc.weight"], w.get("fc.bias"))
        else:
            residual = f if f.shape[-1] == c.hidden else linear(f, w["fc.weight"])
            e, _ = ops.rms_norm(e, self._of("input_layernorm.weight"), eps)
            h, _ = ops.rms_norm(residual, self._of("hidden_norm.weight"), eps)
            x = torch.cat([e, h], -1)
        M, width = token.shape[0], c.heads * c.head_dim
        q, k, v = linear(x, self.qkv, self.qkv_bias).split(
            (width, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim), -1
        )
        k, v = k.view(M, c.kv_heads, c.head_dim), v.view(M, c.kv_heads, c.head_dim)
        q = q.view(M, c.heads, c.head_dim)
        q = ops.rotary(q, k, v, position, self.cos, self.sin, node_k[0], node_v[0])
        out = linear(attend(0, q).reshape(M, width), self._of("self_attn.o_proj.weight"))
        post = self._of("post_attention_layernorm.weight")
        x, residual = ops.rms_norm(out, post, eps, residual)
        x = ops.swiglu(linear(x, self.gate_up))
        return residual + linear(x, self._of("mlp.down_proj.weight"))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [M, V], -inf for tokens that are not in the head's vocabulary."""
        if self.version == 1:
            return self.target.logits(hidden.to(self.target.embedding.dtype))
        head, eps = self.weights["lm_head.weight"], self.config.norm_eps
        scale = hidden.float().pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
        z = linear(self.weights["norm.weight"] * (hidden.float() * scale).to(self.dtype), head)
        if self.token is None:
            return z
        wide = z.new_full((z.shape[0], self.config.vocab), -torch.inf)
        return wide.index_copy_(1, self.token, z)


def read_head(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> EagleHead:
    """Read a head from a folder with config.json and *.safetensors.

    dtype: by default the file's. Raises ValueError for a folder without a valid head.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    folder, name = Path(path), repr(str(path))
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        raise ValueError(f"{name} is not an EAGLE head: it needs config.json and *.safetensors")
    try:
        settings = read_file(folder / "config.json", dict)
        config = ModelConfig.from_transformers(LlamaConfig(**settings))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} has an invalid config.json: {error}") from error
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        check_regular(file)
        try:
            weights |= load_file(file, device=str(device))
        except SafetensorError as error:
            raise ValueError(f"{name} cannot be loaded: {file.name}: {error}") from error
    if "fc.weight" not in weights:
        raise ValueError(f"{name} has no weights 'fc.weight': it is not an EAGLE head")
    dtype = dtype or weights["fc.weight"].dtype
    # indices of tokens keep their dtype
    cast = {k: x.to(dtype) if x.is_floating_point() else x for k, x in weights.items()}
    return EagleHead(config, cast, name)


class Eagle(NetworkSpec):
    """A trained head of EAGLE-1, 2 or 3 on the target's hidden states, as a `drafter`.

    path: a folder with the head's config.json and *.safetensors in their published layout. dtype:
    by default the file's. The other arguments are those of `NetworkSpec`: with "match" the tree is
    EAGLE-2's dynamic tree over all samples. Alone and on a GPU it drafts without the host, so its
    steps are captured.

    Raises ValueError for a folder without a valid head; the call raises ValueError for a head of
    another model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        k: int = 8,
        depth: int = 5,
        temperature: float | tuple[float, ...] | list[float] | None = None,
        graph: bool = False,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(k=k, depth=depth, temperature=temperature, graph=graph)
        self.path, self.dtype = path, dtype
        self._head: EagleHead | None = None

    def __repr__(self) -> str:
        return f"Eagle({str(self.path)!r}, k={self.k}, depth={self.depth})"

    def _network(self, device: str | torch.device) -> EagleHead:
        if self._head is None or self._head.device != torch.device(device):
            self._head = read_head(self.path, device, self.dtype)
        return self._head
