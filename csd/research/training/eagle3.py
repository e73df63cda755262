"""Training of EAGLE-3 heads (arXiv 2503.01840): unrolls chains of a head's own states.

The head has gradients, and parameters with their published names. For token t[i] and f[i-1], the
joined states of three of the target's layers at the token before:

    h = fc f[i-1],   x = h + attention([norm(E t[i]), norm(h)]),   h' = x + mlp(norm(x))

and logits lm_head norm(h') over the head's own vocabulary. The next token of a chain is read with
h' in place of h. `draft_models.eagle.EagleHead` computes the same, one level at a time.

All chains of a step attend at once (`chain_attention`). A chain begins at a pair of its text. Its
query sees the text's keys up to that pair, computed from the target's states, and the chain's own
keys, computed from guessed states. As a mask: a triangle, and next to it one diagonal per step.

The loss compares the tokens that chains draft; no state is compared with the target's:

    L = 1/R sum over j of decay^j sum over chains of cross_entropy(p, lm_head norm(h'[j]))

R is the number of learnt pairs, each of which begins a chain. p is the target's distribution at
temperature 1 over the head's vocabulary, normalised to sum 1. Positions whose likeliest token is
outside that vocabulary have no loss.
"""

from bisect import bisect_left
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from csd.research.draft_models.eagle import FEWEST, read_layers
from csd.research.training.eagle2 import ROWS
from csd.research.training.head_parts import DraftHead, HeadLayer
from csd.research.training.recipe import Losses, Method, Recipe
from csd.research.training.target import Target
from csd.research.training.texts import Pairs, Text, draft_tokens, maps

# queries whose scores are in memory at once
CHAIN_ROWS = 256


def chain_attention(
    q: torch.Tensor,  # [R, H, D], queries of chains, texts concatenated
    k: torch.Tensor,  # [P, K, D], keys of pairs
    v: torch.Tensor,  # [P, K, D]
    own_k: torch.Tensor,  # [J, R, K, D], keys of the chains' own tokens
    own_v: torch.Tensor,  # [J, R, K, D]
    spans: list[tuple[int, int, int]],  # per text: first pair, pair of the first chain, end
    scale: float,
) -> torch.Tensor:
    """softmax(scale q k^T) v [R, H, D]. The spans list the chains in the order of `q`.

    Only the scores of `CHAIN_ROWS` queries are in memory; they are recomputed for the gradients.
    """
    out, done = [], 0
    for first, begin, end in spans:
        for a in range(begin, end, CHAIN_ROWS):
            b = min(a + CHAIN_ROWS, end)
            rows = slice(done, done + b - a)
            part = q[rows], k[first:b], v[first:b], own_k[:, rows], own_v[:, rows], scale
            out.append(checkpoint(_mixed, *part, use_reentrant=False, preserve_rng_state=False))
            done = rows.stop
    return torch.cat(out)


def _mixed(
    q: torch.Tensor,  # [r, H, D]; the last row sees all of k
    k: torch.Tensor,  # [n, K, D]
    v: torch.Tensor,  # [n, K, D]
    own_k: torch.Tensor,  # [J, r, K, D]
    own_v: torch.Tensor,  # [J, r, K, D]
    scale: float,
) -> torch.Tensor:
    """Attention [r, H, D] of chains that begin at consecutive pairs."""
    n, dtype = len(k), torch.promote_types(q.dtype, torch.float32)
    q = q.unflatten(1, (k.shape[1], -1))
    text = torch.einsum("rkgd,nkd->kgrn", q, k).to(dtype)
    text = text.masked_fill(_later(len(q), n, q.device), -torch.inf)
    own = torch.einsum("rkgd,jrkd->kgrj", q, own_k).to(dtype)
    p = (torch.cat([text, own], -1) * scale).softmax(-1).to(v.dtype)
    out = torch.einsum("kgrn,nkd->rkgd", p[..., :n], v)
    return (out + torch.einsum("kgrj,jrkd->rkgd", p[..., n:], own_v)).flatten(1, 2)


def _later(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Mask [rows, keys], True for keys after the pair of each row; the last row has none."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)


class MiddleLayer(HeadLayer):
    """Layer whose attention reads a token's embedding and a state, each after its own norm."""

    def __init__(self, c: Any, wide: int, **factory: Any):
        super().__init__(c, wide, 2 * c.hidden, **factory)
        self.hidden_norm = nn.RMSNorm(c.hidden, c.norm_eps, **factory)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps, **factory)


class Eagle3Head(DraftHead):
    """Head with its own vocabulary: the target's tokens `token` [Vd] int64; None means all."""

    def __init__(self, target: Target, token: torch.Tensor | None, dtype: torch.dtype, seed: int):
        super().__init__(target.config, dtype, target.device)
        c, self.token = target.config, token
        size = c.vocab if token is None else len(token)
        self.fc = nn.Linear(3 * c.hidden, c.hidden, bias=False, **self.factory)
        self.midlayer = MiddleLayer(c, self.intermediate, **self.factory)
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps, **self.factory)
        self.lm_head = nn.Linear(c.hidden, size, bias=False, **self.factory)
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


def chain_losses(
    target: Target,
    head: Eagle3Head,
    guesses: list[torch.Tensor],  # per step, [R, hidden], later with fewer rows
    states: torch.Tensor,  # [R, hidden], the target's last states at the learnt pairs
    pairs: Pairs,
    depth: int,
    decay: float | None = None,
) -> Losses:
    """Losses of a batch; with a decay, backpropagates L through the head's logits and `guesses`.

    Logits of only `ROWS` positions are in memory: the target's, and the head's of one step. With a
    decay hits are not counted.
    """
    total, token = Losses.none(depth), head.token
    dtype = torch.promote_types(head.dtype, torch.float32)
    following = pairs.token[pairs.learnt_at + 1]
    # per step, ascending numbers of the learnt pairs whose states are guessed
    positions = [[base + step for base in pairs.chains(step)[0]] for step in range(len(guesses))]
    gradients: list[list[torch.Tensor]] = [[] for _ in guesses]
    for a in range(0, len(states), ROWS):
        b = min(a + ROWS, len(states))
        p = _distribution(target, states[a:b], token, dtype)
        for step, guess in enumerate(guesses):
            first, last = bisect_left(positions[step], a), bisect_left(positions[step], b)
            if first == last:
                continue
            rows = torch.tensor(positions[step][first:last], device=guess.device)
            x = guess[first:last].detach().requires_grad_(decay is not None)
            with torch.set_grad_enabled(decay is not None):
                z = head.logits(x).to(dtype)
                loss = -(p[rows - a] * z.log_softmax(-1)).sum()
            total.tokens[step] += float(loss.detach())
            total.places[step] += last - first
            if decay is not None:
                (loss * (decay**step / len(states))).backward()
                assert x.grad is not None
                gradients[step].append(x.grad)
                continue
            drafted = z.argmax(-1) if token is None else token[z.argmax(-1)]
            total.hits[step] += int((drafted == following[rows]).sum())
    if decay is not None:
        torch.autograd.backward(guesses, [torch.cat(parts) for parts in gradients])
    return total


@torch.no_grad()
def _distribution(
    target: Target, states: torch.Tensor, token: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """p [r, Vd]; rows whose likeliest token is not in the head's vocabulary are 0."""
    z = target.logits(states).to(dtype)
    if token is None:
        return z.softmax(-1)
    mine = z[:, token]
    inside = mine.amax(-1, keepdim=True) == z.amax(-1, keepdim=True)
    return mine.softmax(-1) * inside


class ByChains(Method):
    """Training of a head that reads three of the target's layers, then its own states.

    Raises ValueError, naming the argument, for a model with too few layers or tokens.
    """

    head: Eagle3Head

    def __init__(self, target: Target, recipe: Recipe, learnt: list[Text], dtype: torch.dtype):
        assert recipe.depth is not None and recipe.decay is not None
        self.decay, self.target = recipe.decay, target
        self.weights = [recipe.decay**j for j in range(recipe.depth)]
        config = target.config
        if config.layers < FEWEST:
            raise ValueError(
                f"model must have at least {FEWEST} layers for eagle=3, got {config.layers}"
            )
        token = draft_tokens(learnt, config.vocab, recipe.draft_vocab, target.device)
        target.decoder.taps = read_layers(config.layers)
        self.head = Eagle3Head(target, token, dtype, recipe.seed)

    def losses(self, texts: list[Text], step: int | None = None) -> Losses:
        states, joined = self.target.states_and_taps(texts)
        pairs = Pairs(texts, self.target.device)
        embedded = F.embedding(pairs.token[pairs.at], self.target.embedding)
        depth = len(self.weights)
        guesses = self.head(embedded, joined[pairs.at - 1], pairs, depth)
        decay = None if step is None else self.decay
        return chain_losses(
            self.target, self.head, guesses, states[pairs.learnt_at], pairs, depth, decay
        )

    def acceptance(self, measured: Losses) -> dict[str, Any]:
        """The first step's acceptance, and `by_step`, those of all steps, None without places."""
        by_step = measured.acceptance
        return {"acceptance": by_step[0], "by_step": by_step if measured.places[0] else None}
