"""Target models without weights: their next token is known for every prefix."""

from types import SimpleNamespace

import torch

from csd.engine.engine import Engine
from csd.models.load import Loaded

VOCAB = 32


def config(vocab=VOCAB, context=4096):
    return SimpleNamespace(
        layers=1, heads=1, kv_heads=1, head_dim=2, vocab=vocab, context=context, hidden=2
    )


def feature(token, position):
    """A small whole number for a token at a place."""
    return (token * 7919 + position * 10473 + token * position * 31) % 1009


class PrefixSum:
    """Logits depend on the sum of a feature over every token of the prefix.

    The sum comes out of attention over the values in the caches (queries are zero, so attention is
    a mean), so a key or value that is missing, doubled or misplaced changes what is sampled.
    """

    def __init__(self, vocab=VOCAB, sharpness=2.0, context=4096):
        self.config = config(vocab, context)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(1009, vocab, generator=generator, dtype=torch.float64) * sharpness

    def forward(self, token, position, attend, node_k, node_v, ops=None):
        token, position = token.clamp(min=0).long(), position.long()
        node_k[0] = 0
        node_v[0, :, 0] = feature(token, position).double()[:, None]
        q = torch.zeros(token.shape[0], 1, 2, dtype=torch.float64)
        mean = attend(0, q)[:, 0, 0]
        return (mean * (position + 1)).round().long() % 1009

    def logits(self, hidden):
        return self.table[hidden]

    def next_logits(self, prefix: list[int]) -> torch.Tensor:
        return self.table[sum(feature(t, i) for i, t in enumerate(prefix)) % 1009]


class LastToken:
    """Logits are a function of (last token, place); nothing is read from the caches."""

    def __init__(self, logits_of, vocab=VOCAB, context=4096):
        self.config = config(vocab, context)
        self._logits_of = logits_of

    def forward(self, token, position, attend, node_k, node_v, ops=None):
        return torch.stack([token.clamp(min=0).long(), position.long()], dim=1)

    def logits(self, hidden):
        return self._logits_of(hidden[:, 0], hidden[:, 1])


def counting(end):
    """A target that is sure to count on from the last token, and after end - 1 from 0 again."""

    def logits_of(token, position):
        logits = torch.full((token.shape[0], VOCAB), -50.0, dtype=torch.float64)
        logits[torch.arange(token.shape[0]), (token + 1) % end] = 50.0
        return logits

    return LastToken(logits_of)


class Letters:
    """A tokenizer of one character a token: a to z, then symbols."""

    alphabet = "abcdefghijklmnopqrstuvwxyz .,!?-"
    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [self.alphabet.index(c) for c in text]}

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(self.alphabet[t] for t in tokens)


def engine(decoder, tokenizer=None, generation_config=None, **options) -> Engine:
    loaded = Loaded(
        decoder=decoder,
        config=decoder.config,
        tokenizer=tokenizer,
        generation_config=generation_config,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    return Engine(loaded, **options)


def loaded(decoder):
    return Loaded(decoder, decoder.config, None, None, torch.device("cpu"), torch.float64)


class Near(PrefixSum):
    """Like `PrefixSum` of the same vocabulary, but often of another opinion."""

    def __init__(self, vocab=VOCAB):
        super().__init__(vocab)
        generator = torch.Generator().manual_seed(5)
        other = torch.randn(self.table.shape, generator=generator, dtype=torch.float64)
        self.table = self.table + 1.5 * other
