"""EAGLE-3 head (arXiv 2503.01840) with gradients; parameters have their published names.

For token t[i] and f[i-1], the joined states of three of the target's layers at the token before:

    h = fc f[i-1],   x = h + attention([norm(E t[i]), norm(h)]),   h' = x + mlp(norm(x))

and logits lm_head norm(h') over the head's own vocabulary. The next token of a chain is read with
h' in place of h. `csd.graph.model.eagle.EagleHead` computes the same, one level at a time.
"""

from typing import Any

import torch
from torch import nn

from csd.training.chain_attention import chain_attention
from csd.training.draft_vocab import maps
from csd.training.head_parts import DraftHead, Layer
from csd.training.pairs import Pairs
from csd.training.target import Target


class MiddleLayer(Layer):
    """Layer whose attention reads a token's embedding and a state, each after its own norm."""

    def __init__(self, c: Any, wide: int, **kept: Any):
        super().__init__(c, wide, 2 * c.hidden, **kept)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps, **kept)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, **kept)


class Eagle3Head(DraftHead):
    """Head with its own vocabulary: the target's tokens `token` [Vd] int64; None means all."""

    def __init__(self, target: Target, token: torch.Tensor | None, dtype: torch.dtype, seed: int):
        super().__init__(target.config, dtype, target.device)
        c, self.token = target.config, token
        size = c.vocab if token is None else len(token)
        self.fc = nn.Linear(3 * c.hidden, c.hidden, bias=False, **self.kept)
        self.midlayer = MiddleLayer(c, self.intermediate, **self.kept)
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps, **self.kept)
        self.lm_head = nn.Linear(c.hidden, size, bias=False, **self.kept)
        self._begin(seed)
        self._copy(target)

    @torch.no_grad()
    def _copy(self, target: Target) -> None:
        """Initialise so that the first logits are those of the highest tapped state: fc selects it,
        norm and lm_head are the target's."""
        hidden, head = self.config.hidden, target.head
        self.fc.weight[:, : 2 * hidden] = 0
        self.fc.weight[:, 2 * hidden :] = torch.eye(hidden)
        self.norm.weight.copy_(target.norm)
        self.lm_head.weight.copy_(head if self.token is None else head[self.token])
        self.lm_head.weight /= self.config.logit_divisor

    def forward(
        self,
        embedded: torch.Tensor,  # [P, hidden], embeddings of the pairs' tokens
        states: torch.Tensor,  # [P, 3 hidden], states of three layers at the tokens before them
        pairs: Pairs,
        depth: int,  # largest number of tokens of a chain
    ) -> list[torch.Tensor]:
        """States that chains guess, per step: [R, hidden], with fewer rows once texts end.

        A chain begins at each learnt pair. Step 0 reads the pairs, step j reads the j-th token
        after them with the state of step j - 1 in place of the target's. Rows are in the order of
        `Pairs.chains`.
        """
        layer, rows = self.midlayer, pairs.rows
        q_proj, k_proj, v_proj = (getattr(layer.self_attn, f"{x}_proj") for x in "qkv")
        embedded = self._normed(layer.input_layernorm, embedded.to(self.dtype))
        state = self._times(self.fc, states.to(self.dtype))
        x = torch.cat([embedded, self._normed(layer.hidden_norm, state)], -1)
        k, v = self._heads(k_proj, x, pairs.position), self._heads(v_proj, x)
        own_k = own_v = k.new_empty(0, len(rows), *k.shape[1:])
        bases, spans = pairs.chains(0)
        read, state, x, position = rows, state[rows], x[rows], pairs.position[rows]
        guesses: list[torch.Tensor] = []
        for step in range(depth):
            if step:
                after, spans = pairs.chains(step)
                if not after:
                    break
                row = {base: r for r, base in enumerate(bases)}
                stay = torch.tensor([row[base] for base in after], device=rows.device)
                bases, read = after, read[stay] + 1
                state, position = guesses[-1][stay], position[stay] + 1
                x = torch.cat([embedded[read], self._normed(layer.hidden_norm, state)], -1)
                own_k = torch.cat([own_k[:, stay], self._heads(k_proj, x, position)[None]])
                own_v = torch.cat([own_v[:, stay], self._heads(v_proj, x)[None]])
            q = self._heads(q_proj, x, position)
            mixed = chain_attention(q, k, v, own_k, own_v, spans, self.scale)
            guesses.append(self._after(layer, state, mixed))
        return guesses

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of states [R, hidden]."""
        return self._times(self.lm_head, self._normed(self.norm, state))

    def _settings(self) -> dict[str, Any]:
        own = dict(tie_word_embeddings=False, draft_vocab_size=self.lm_head.out_features)
        return super()._settings() | own

    def _maps(self) -> dict[str, torch.Tensor]:
        return {} if self.token is None else maps(self.token.cpu(), self.config.vocab)
