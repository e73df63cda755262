"""Random EAGLE heads in their published layout, and what the papers' formulas make of them."""

import json
import math

import torch
from safetensors.torch import save_file

HEADS, KV_HEADS, D, INTER, EPS, THETA = 4, 2, 8, 48, 1e-5, 10000.0


def write(folder, version, hidden, vocab, *, draft_vocab=None, states=None, embedding=False):
    """A head for a target of this width; returns its weights. states: width of f in EAGLE-3."""
    generator = torch.Generator().manual_seed(version)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3

    three = version == 3
    layer, wide = ("midlayer", 2 * hidden) if three else ("layers.0", hidden)
    shapes = {
        "self_attn.q_proj": (HEADS * D, wide),
        "self_attn.k_proj": (KV_HEADS * D, wide),
        "self_attn.v_proj": (KV_HEADS * D, wide),
        "self_attn.o_proj": (hidden, HEADS * D),
        "mlp.gate_proj": (INTER, hidden),
        "mlp.up_proj": (INTER, hidden),
        "mlp.down_proj": (hidden, INTER),
        "post_attention_layernorm": (hidden,),
    }
    if three:
        shapes |= dict.fromkeys(("hidden_norm", "input_layernorm"), (hidden,))
    w = {f"{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    w["fc.weight"] = normal(hidden, states or (3 * hidden if three else 2 * hidden))
    if three:
        w["norm.weight"], w["lm_head.weight"] = normal(hidden) + 1, normal(draft_vocab, hidden) * 6
        # the head's tokens are every second of the target's from 3 on
        token = torch.arange(draft_vocab) * 2 + 3
        w["d2t"] = token - torch.arange(draft_vocab)
        w["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, token, True)
    else:
        w["fc.bias"] = normal(hidden)
    if embedding:
        w["embed_tokens.weight"] = normal(vocab, hidden)
    save_file(w, folder / "model.safetensors")
    config = dict(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=INTER,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=D,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        max_position_embeddings=512,
        vocab_size=vocab,
        hidden_act="silu",
    ) | ({"draft_vocab_size": draft_vocab} if three else {})
    (folder / "config.json").write_text(json.dumps(config))
    return w


def norm(x, weight, rounded=torch.float32):
    wide = x.to(rounded)
    scale = (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return weight * (wide * scale).to(x.dtype)


def rotate(x, place, rounded=torch.float32):
    """x: [heads, D] at a position, halves paired; tables are float32 as transformers' are."""
    w = 1.0 / (THETA ** (torch.arange(0, D, 2).to(rounded) / D))
    angle = torch.cat([place * w, place * w])
    half = torch.cat([-x[:, D // 2 :], x[:, : D // 2]], -1)
    return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)


class PlainHead:
    """One pair (token, state before it) at a time; keys and values in lists.

    rounded: dtype of norms and rotary tables, float32 as in transformers; float64 is the formula.
    """

    def __init__(self, weights, embedding, head, rounded=torch.float32):
        self.w, self.head, self.rounded = weights, head, rounded
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.three = "midlayer.hidden_norm.weight" in weights
        self.keys, self.values = [], []

    def copy(self):
        other = PlainHead(self.w, self.embedding, self.head, self.rounded)
        other.keys, other.values = [*self.keys], [*self.values]
        return other

    def _norm(self, x, weight):
        return norm(x, weight, self.rounded)

    def read(self, token, state):
        """The state that is guessed to follow."""
        w, e = self.w, self.embedding[token]
        layer = "midlayer" if self.three else "layers.0"

        def at(name):
            return w[f"{layer}.{name}.weight"]

        if self.three:
            below = state if state.shape[0] == e.shape[0] else w["fc.weight"] @ state
            x = torch.cat(
                [self._norm(e, at("input_layernorm")), self._norm(below, at("hidden_norm"))]
            )
        else:
            x = below = w["fc.weight"] @ torch.cat([e, state]) + w["fc.bias"]
        place = len(self.keys)
        q = rotate((at("self_attn.q_proj") @ x).view(HEADS, D), place, self.rounded)
        self.keys.append(
            rotate((at("self_attn.k_proj") @ x).view(KV_HEADS, D), place, self.rounded)
        )
        self.values.append((at("self_attn.v_proj") @ x).view(KV_HEADS, D))
        k, v = torch.stack(self.keys), torch.stack(self.values)
        out = []
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            out.append((k[:, g] @ q[h] / math.sqrt(D)).softmax(0) @ v[:, g])
        x = below + at("self_attn.o_proj") @ torch.cat(out)
        y = self._norm(x, at("post_attention_layernorm"))
        gate = torch.nn.functional.silu(at("mlp.gate_proj") @ y)
        return x + at("mlp.down_proj") @ (gate * (at("mlp.up_proj") @ y))

    def chances(self, state):
        """Probability of each of the target's tokens."""
        if not self.three:
            return (self.head @ state).softmax(0)
        p = (self.w["lm_head.weight"] @ self._norm(state, self.w["norm.weight"])).softmax(0)
        out = p.new_zeros(self.w["t2d"].shape[0])
        out[torch.arange(len(p)) + self.w["d2t"]] = p
        return out


def assert_rounds_as(got, plain, exact):
    """Errors against the float64 formula are at most 4 times those of a plain float32 run."""
    error, allowed = ((x - exact).abs().max().item() for x in (got, plain))
    assert 0 < allowed < 1e-3
    assert error <= 4 * allowed
