"""Plain sampling with keyed noise, from scratch: numpy, transformers, and nothing of csd.

The whole sequence goes through the transformers model for every token. Filters are transformers'
own classes. This file is what csd's tokens are compared with.
"""

import numpy as np
import torch
from helpers.oracles.grammar_oracle import Grammar, ends_in, thought_end, thought_start
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

GRAMMARS = ("json_schema", "regex", "grammar")
U64 = np.uint64
LOW = U64(0xFFFFFFFF)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key_of(seed: int, prompt: list[int]) -> int:
    key = mix(seed % 2**64)
    for token in prompt:
        key = mix(key ^ token)
    return key


def philox(key: int, counter: tuple) -> np.ndarray:
    """Four uint32 words, as uint64, for counter words that broadcast."""
    c = [np.asarray(x, dtype=U64) & LOW for x in counter]
    c = list(np.broadcast_arrays(*c))
    k = [U64(key % 2**32), U64(key >> 32)]
    for _ in range(10):
        a, b = c[0] * U64(0xD2511F53), c[2] * U64(0xCD9E8D57)
        c = [(b >> U64(32)) ^ c[1] ^ k[0], b & LOW, (a >> U64(32)) ^ c[3] ^ k[1], a & LOW]
        k = [(k[0] + U64(0x9E3779B9)) & LOW, (k[1] + U64(0xBB67AE85)) & LOW]
    return np.stack(c)


def words(key: int, tokens, position: int, sample: int, stream: int) -> np.ndarray:
    tokens = np.asarray(tokens)
    four = philox(key, (tokens // 4, position, sample, stream))
    return np.take_along_axis(four, (tokens % 4)[None].astype(np.int64), 0)[0]


def gumbel(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    v = (x + 0.5) / 2**32
    u = ((2.0**32 - 1 - x) + 0.5) / 2**32
    return -np.log(np.where(v > 0.5, -np.log(u), -np.log1p(-v)))


class Bias(LogitsProcessor):
    """In the dtype of the logits; transformers' own is float32."""

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores


class Allowed(LogitsProcessor):
    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        found = torch.full_like(scores, -np.inf)
        found[:, self.tokens] = scores[:, self.tokens]
        return found


class Counts(LogitsProcessor):
    """Penalties on a sample's own tokens, as OpenAI defines them; transformers has none."""

    def __init__(self, prompt_len, params):
        self.prompt_len = prompt_len
        self.each = params.get("frequency_penalty") or 0
        self.once = params.get("presence_penalty") or 0

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        own = input_ids[0, self.prompt_len :].tolist()
        for token in set(own):
            scores[0, token] -= self.each * own.count(token)
            scores[0, token] -= self.once
        return scores


class Thought(LogitsProcessor):
    """Once a budget of thought is spent, its end is all that is left.

    once: of samples that think at their begin or not at all.
    """

    def __init__(self, prompt_len, tags, most, once=False):
        self.prompt_len, self.most, self.once = prompt_len, most, once
        self.begin, self.end, self.close = tags[0], tags[1], tags[-1]

    def spent(self, ids):
        """Tokens of thought, None where no thought is open."""
        inside, spent = ends_in(ids[: self.prompt_len], self.begin), 0
        for i in range(self.prompt_len, len(ids)):
            spent += inside
            upto = ids[: i + 1]
            if upto[-len(self.end) :] == self.end:
                inside = False
            elif upto[-len(self.begin) :] == self.begin:
                inside = True
        return spent if inside else None

    def spent_at_the_begin(self, ids):
        prompt, own = ids[: self.prompt_len], ids[self.prompt_len :]
        start = thought_start(prompt, own, self.begin)
        if start is None or thought_end(prompt, own, start, self.end) is not None:
            return None
        return len(own) - start

    def only(self, ids):
        """The only token behind ids, or None."""
        spent = self.spent_at_the_begin(ids) if self.once else self.spent(ids)
        if spent is None or spent < self.most:
            return None
        begun = [k for k in range(1, len(self.close)) if ids[-k:] == self.close[:k]]
        return self.close[max(begun, default=0)]

    def __call__(self, input_ids, scores):
        token = self.only(input_ids[0].tolist())
        if token is not None:
            scores = torch.full_like(scores, -np.inf)
            scores[:, token] = 0
        return scores


def processors(prompt_len, vocab, params: dict, end_ids, given=False) -> LogitsProcessorList:
    """In the order of the documentation; bans of transformers are -inf, so their order is free.

    given: True if tokens are given, some of which a grammar may not allow.
    """
    found = LogitsProcessorList()
    if params.get("logit_bias"):
        found.append(Bias(params["logit_bias"]))
    if params.get("bad_words"):
        found.append(NoBadWordsLogitsProcessor([list(word) for word in params["bad_words"]]))
    if params.get("allowed_token_ids") is not None:
        found.append(Allowed(params["allowed_token_ids"]))
    if params.get("suppress_tokens"):
        found.append(SuppressTokensLogitsProcessor(params["suppress_tokens"]))
    if params.get("no_repeat_ngram_size"):
        found.append(NoRepeatNGramLogitsProcessor(params["no_repeat_ngram_size"]))
    if params.get("repetition_penalty", 1) != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if params.get("min_new_tokens"):
        found.append(
            MinNewTokensLengthLogitsProcessor(prompt_len, params["min_new_tokens"], list(end_ids))
        )
    if params.get("presence_penalty") or params.get("frequency_penalty"):
        found.append(Counts(prompt_len, params))
    thinks = params.get("max_thinking_tokens") is not None
    tags = [list(tag) for tag in params.get("thinking_tags") or ()]
    grammar = {name: params[name] for name in GRAMMARS if params.get(name) is not None}
    masks = []
    if grammar:
        thought = tags[:2] if thinks else None
        masks.append(Grammar(grammar, prompt_len, vocab, end_ids, thought, given))
    functions = params.get("logits_processor") or ()
    functions = functions if isinstance(functions, list | tuple) else [functions]
    # a function may allow nothing that the grammar does not
    found += [*masks, *functions, *masks] if functions else masks
    if thinks:
        most = params["max_thinking_tokens"]
        found.append(Thought(prompt_len, tags, most, once=bool(grammar)))
    if params.get("temperature", 1) == 0:
        # no draw, so no filter
        return found
    if params.get("temperature", 1) != 1:
        found.append(TemperatureLogitsWarper(params["temperature"]))
    if 0 < params.get("top_k", 0) < vocab:
        found.append(TopKLogitsWarper(params["top_k"]))
    if params.get("top_p", 1) < 1:
        found.append(TopPLogitsWarper(params["top_p"]))
    if params.get("min_p", 0) > 0:
        found.append(MinPLogitsWarper(params["min_p"]))
    if params.get("typical_p", 1) < 1:
        found.append(TypicalLogitsWarper(params["typical_p"]))
    return found


def top_of(process: LogitsProcessorList, ids, logits) -> float:
    """Largest score before the filters that drop tokens, below which the head begins."""
    cuts = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper)
    uncut = LogitsProcessorList(p for p in process if not isinstance(p, cuts))
    return float(uncut(ids, logits.clone()).max())


def choose(z: np.ndarray, key, position, sample, top_k, top=None) -> tuple[int, float]:
    """The sampled token and how far its score lies above the second best.

    top: largest score before the filters, if not that of z.
    """
    vocab, top = z.shape[0], z.max() if top is None else top
    head = z > -np.inf if 0 < top_k <= 1024 else z >= top - 11.1
    rest = (z > -np.inf) & ~head
    ids = np.flatnonzero(head)
    score = z[ids] + gumbel(words(key, ids, position, sample, 0))
    if rest.any():
        ids = np.append(ids, vocab)
        mass = np.log(np.exp(z[rest] - z.max()).sum()) + z.max()
        score = np.append(score, mass + gumbel(words(key, [vocab], position, sample, 0)))
    token = int(ids[np.argmax(score)])
    best = np.sort(score)[::-1]
    gap = float(best[0] - best[1]) if len(best) > 1 else np.inf
    if token == vocab:
        u = (float(words(key, [0], position, sample, 1)[0]) + 0.5) / 2**32
        cdf = np.cumsum(np.where(rest, np.exp(z - z.max()), 0))
        token = min(int(np.searchsorted(cdf, u * cdf[-1], side="right")), np.flatnonzero(rest)[-1])
    return int(token), gap


def gap_of(z: np.ndarray, token, key, position, sample, top_k, temperature, top) -> float:
    """Gap between the drawn token's score and that of `token`; inf without probability."""
    if z[token] == -np.inf:
        return np.inf
    if temperature == 0:
        return float(z.max() - z[token])
    drawn, _ = choose(z, key, position, sample, top_k, top)
    head = z > -np.inf if 0 < top_k <= 1024 else z >= top - 11.1
    weight = np.where(head, 0, np.exp(z - z.max()))
    if head[token] or head[drawn]:
        atoms = [t if head[t] else None for t in (drawn, token)]
        of_drawn, own = (_score(z, t, weight, key, position, sample) for t in atoms)
        return max(of_drawn - own, 0.0)
    u = (float(words(key, [0], position, sample, 1)[0]) + 0.5) / 2**32
    cdf = np.cumsum(weight) / weight.sum()
    return max(cdf[token] - weight[token] / weight.sum() - u, u - cdf[token], 0.0)


def _score(z, token, rest, key, position, sample) -> float:
    """Score of a token of the head, or of the rest's weights if `token` is None."""
    level = z[token] if token is not None else np.log(rest.sum()) + z.max()
    atom = z.shape[0] if token is None else token
    return float(level + gumbel(words(key, [atom], position, sample, 0))[0])


class NoTokenLeft(Exception):
    """Behind the tokens that are its argument."""


@torch.no_grad()
def generate(model, prompt, *, seed, sample, max_new_tokens, end_ids=(), **params):
    """Tokens, processed and raw log-probabilities, and the score gap of each choice."""
    key = key_of(seed, prompt)
    tokens, logprobs, raw_logprobs, gaps = [], [], [], []
    vocab = model.config.vocab_size
    process = processors(len(prompt), vocab, params, end_ids)
    for position in range(max_new_tokens):
        ids = torch.tensor([prompt + tokens])
        logits = model(ids, use_cache=False).logits[:, -1]
        z = process(ids, logits.clone())
        if not (z > -np.inf).any():
            raise NoTokenLeft(tokens)
        if params.get("temperature", 1) == 0:
            token, gap = int(z[0].argmax()), float(z[0].topk(2).values.diff().abs())
        else:
            top_k = params.get("top_k", 0)
            top_k = top_k if top_k < vocab else 0
            top = top_of(process, ids, logits)
            token, gap = choose(z[0].double().numpy(), key, position, sample, top_k, top)
        raw = logits.double().log_softmax(-1)[0, token]
        greedy = params.get("temperature", 1) == 0
        tokens.append(token)
        raw_logprobs.append(float(raw))
        logprobs.append(float(raw if greedy else z.double().log_softmax(-1)[0, token]))
        gaps.append(gap)
        if token in end_ids:
            break
    return tokens, logprobs, raw_logprobs, gaps


@torch.no_grad()
def given(model, prompt, tokens, *, seed, sample, end_ids=(), **params):
    """Processed and raw log-probabilities, and audit gaps, of tokens that are given.

    Where no token is left the given one has none of the processed probability.
    """
    key, vocab = key_of(seed, prompt), model.config.vocab_size
    temperature, top_k = params.get("temperature", 1), params.get("top_k", 0)
    process = processors(len(prompt), vocab, params, end_ids, given=True)
    found = []
    for position, token in enumerate(tokens):
        ids = torch.tensor([prompt + tokens[:position]])
        logits = model(ids, use_cache=False).logits[:, -1]
        raw = logits.double().log_softmax(-1)[0, token]
        z = process(ids, logits.clone())[0].double()
        if not (z > -np.inf).any():
            found.append((float(raw) if temperature == 0 else -np.inf, float(raw), np.inf))
            continue
        chance = raw if temperature == 0 else z.log_softmax(-1)[token]
        k, top = top_k if top_k < vocab else 0, top_of(process, ids, logits)
        gap = gap_of(z.numpy(), token, key, position, sample, k, temperature, top)
        found.append((float(chance), float(raw), gap))
    return [list(values) for values in zip(*found, strict=True)]


@torch.no_grad()
def own(model, ids):
    """The model's log-probabilities [len(ids), V] behind each token, one pass per token."""
    rows = [
        model(torch.tensor([ids[:i]]), use_cache=False).logits[0, -1]
        for i in range(1, len(ids) + 1)
    ]
    return torch.stack(rows).double().log_softmax(-1)
