"""A transformers model over its own cache, one token after another, in the form of a model."""

import copy
from types import SimpleNamespace

import torch
from transformers import DynamicCache


class TokenByToken:
    """Called with whole sequences, as `oracle` does; of one that it has read, the rest is read."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.read, self.cache, self.logits = [], None, None
        self.first = None  # what was read at once first: a prompt's tokens, and the cache behind

    @torch.no_grad()
    def __call__(self, ids, use_cache=False):
        ids = ids[0].tolist()
        if self.cache is None or ids[: len(self.read)] != self.read:
            self.read, self.cache = [], DynamicCache(config=self.config)
            if self.first is not None and ids[: len(self.first[0])] == self.first[0]:
                self.read, self.cache, self.logits = copy.deepcopy(self.first)
        for token in ids[len(self.read) :]:
            out = self.model(
                torch.tensor([[token]]),
                past_key_values=self.cache,
                use_cache=True,
                position_ids=torch.tensor([[len(self.read)]]),
            )
            self.read.append(token)
            self.logits = out.logits
        if self.first is None:
            self.first = copy.deepcopy((self.read, self.cache, self.logits))
        return SimpleNamespace(logits=self.logits)
