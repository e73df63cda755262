"""A decoder in plain causal attention, and a transformers model to hold it against."""

from types import SimpleNamespace

import torch
from helpers.checks.precision import within_eager
from helpers.models import checkpoints

from csd.kernels.layers.rms_norm import rms_norm_ref
from csd.kernels.layers.rotary import rotary_ref
from csd.kernels.layers.swiglu import swiglu_ref

OPS = SimpleNamespace(rms_norm=rms_norm_ref, rotary=rotary_ref, swiglu=swiglu_ref)


class Dense:
    """A sequence in plain causal attention: the keys and values of all of it, in one tensor."""

    def __init__(self, decoder):
        self.decoder, self.length = decoder, 0
        c = decoder.config
        self.kv = torch.empty(2, c.layers, 0, c.kv_heads, c.head_dim, dtype=decoder.norm.dtype)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        c, n = self.decoder.config, tokens.shape[0]
        position = torch.arange(self.length, self.length + n, dtype=torch.int32)
        self.kv = torch.cat([self.kv, self.kv.new_empty(2, c.layers, n, *self.kv.shape[3:])], 2)
        new = self.kv[:, :, self.length :]

        def attend(layer, q):
            # [H, tokens, D]
            k, v = self.kv[:, layer].repeat_interleave(c.heads // c.kv_heads, 2).transpose(1, 2)
            wide = torch.promote_types(q.dtype, torch.float32)
            score = q.transpose(0, 1).to(wide) @ k.mT.to(wide) * c.head_dim**-0.5
            later = torch.arange(k.shape[1]) > position[:, None]
            p = score.masked_fill(later, float("-inf")).softmax(-1)
            return (p @ v.to(wide)).transpose(0, 1).to(q.dtype)

        self.length += n
        return self.decoder.forward(tokens.int(), position, attend, new[0], new[1], OPS)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(self.hidden(tokens))


def some_tokens(count: int, vocab: int = checkpoints.VOCAB) -> torch.Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(3))


def their_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def assert_same_logits(decoder, tokens, want, prompt: int, exact=None) -> None:
    """At the prefill of `prompt` tokens, then at each step of one token.

    want: transformers' logits, of the decoder's dtype; exact: those of a float64 model of the same
    weights, unless `want` is.
    """
    ours = Dense(decoder)
    got = [ours.logits(tokens[:prompt])]
    got += [ours.logits(tokens[i : i + 1]) for i in range(prompt, len(tokens))]
    assert_near(decoder, torch.cat(got), want, exact)


def assert_near(decoder, got, want, exact=None) -> None:
    """Logits are as near to the exact ones as transformers'; in float64, the same to 1e-9."""
    if exact is None:
        assert want.dtype == torch.float64
        error = (got - want).abs().amax(1)
        assert error.max() <= 1e-9, error.tolist()
    else:
        within_eager(got, want, exact, max(decoder.config.hidden, decoder.config.intermediate))
