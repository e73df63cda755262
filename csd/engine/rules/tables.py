"""Per-row rules of a call's requests, in the tensors of `csd.state.logit_rules.Rules`."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from csd.engine.options.grammar import GRAMMARS, has_grammar
from csd.engine.options.logit_params import WORD_TOKENS
from csd.engine.options.params import RULES, SamplingParams
from csd.engine.options.thinking import Tag, tokens_read
from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import write_rows
from csd.kernels.verify.rules.rows import BLOCK, HITS
from csd.state.logit_rules import RuleKinds, Rules, no_edges, word_edge


@dataclass(frozen=True, slots=True)
class WordTree:
    """A tree over all tokens of each sequence but the last, from the second-last backwards.

    Edge e leads to node e + 1, and edges ascend by their parent, then by their token. The tree has
    at most as many edges as its sequences have tokens, whatever their number and lengths.
    """

    parent: np.ndarray  # [E], node from which each edge starts
    token: np.ndarray  # [E]
    starts: np.ndarray  # [E + 1], the first of each node's `ends`
    ends: np.ndarray  # [B], last tokens of the sequences, in order of their nodes
    longest: int  # tokens of the longest sequence
    hits: int  # largest number of ends on a path from the root

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "WordTree":
        """Make the tree of sequences; those of a single token are left out."""
        words = [word for word in words if len(word) > 1]
        length = np.array([len(word) for word in words], np.int64)
        tokens = np.array([token for word in words for token in word], np.int64)
        last = np.cumsum(length) - 1
        node = np.zeros(len(words), np.int64)
        parents, edges, nodes = [], [], 0
        for depth in range(int(length.max(initial=1)) - 1):
            deeper = np.flatnonzero(length - 1 > depth)
            pairs = np.stack([node[deeper], tokens[last[deeper] - 1 - depth]])
            new, of = np.unique(pairs, axis=1, return_inverse=True)
            node[deeper] = nodes + 1 + of.reshape(-1)
            parents.append(new[0])
            edges.append(new[1])
            nodes += new.shape[1]
        order = np.argsort(node, kind="stable")
        count = np.bincount(node, minlength=nodes + 1)
        # ends on the path to each node; the nodes of a level follow those of the levels above
        total, first = count.copy(), 1
        for parent in parents:
            total[first : first + len(parent)] += total[parent]
            first += len(parent)
        return cls(
            np.concatenate([*parents, node[:0]]),
            np.concatenate([*edges, node[:0]]),
            np.cumsum(count) - count,
            tokens[last][order],
            int(length.max(initial=1)),
            int(total.max()),
        )


@dataclass(frozen=True, slots=True)
class RuleSizes:
    """Sizes of `Rules`: powers of two, so that few different sizes occur."""

    sets: int
    prompt: int  # tokens of a prompt
    edges: int  # of a set's tree of banned sequences
    ends: int  # banned sequences per set
    word: int  # tokens of a banned sequence
    hits: int  # tokens that banned sequences ban in a row
    marks: int  # tokens of a text that ends a thought
    symbols: int  # of a tag that begins or ends a thought, 0 without any
    steps: int  # different ones that the tokens of a vocabulary are in the search for a tag

    def with_room_for(self, other: "RuleSizes") -> "RuleSizes":
        return RuleSizes(*map(max, astuple(self), astuple(other)))


# fields that are not stored in tensors
HOST = ("logits_processor", *GRAMMARS)


def changes_rows(params: SamplingParams) -> bool:
    """True if any option other than repetition_penalty and min_new_tokens changes logits."""
    return any(getattr(params, name) != params.DEFAULTS[name] for name in RULES)


def set_of(params: SamplingParams) -> tuple:
    """Key of a request's rules; requests with equal keys share one row of `Rules`."""
    return tuple(getattr(params, name) for name in RULES if name not in HOST)


def asked_by(requests: Sequence[Request]) -> RuleKinds | None:
    """Changes of logits that the requests of a call need; None if there are none."""
    changed = any(changes_rows(r.params) for r in requests)
    return asked_of(requests) if changed else None


def asked_of(requests: Sequence[Request]) -> RuleKinds:
    every = [r.params for r in requests]
    counts = any(p.presence_penalty or p.frequency_penalty for p in every)
    functions = any(p.logits_processor for p in every)
    return RuleKinds(
        bias=any(
            p.logit_bias
            or p.suppress_tokens
            or p.allowed_token_ids is not None
            or any(len(word) == 1 for word in p.bad_words)
            for p in every
        ),
        words=any(len(word) > 1 for p in every for word in p.bad_words),
        ngram=max(p.no_repeat_ngram_size for p in every),
        early=any(p.min_new_tokens > 0 for p in every),
        penalty=(counts or functions) and any(p.repetition_penalty != 1 for p in every),
        counts=counts,
        thought=any(p.max_thinking_tokens is not None for p in every),
        functions=functions,
        grammar=any(map(has_grammar, every)),
    )


def count_sets(requests: Sequence[Request]) -> int:
    """Rows of `Rules` for the requests' sets."""
    return _power(len({set_of(r.params) for r in requests}))


def sizes_of(
    requests: Sequence[Request], asked: RuleKinds, trees: Collection[WordTree]
) -> RuleSizes:
    """Sizes that the requests need; trees: of their sets."""
    every = (r.params.thinking_tags for r in requests)
    listed_tags = {each for each in every if each is not None}
    marks = [tags[2] for tags in listed_tags]
    tags = [Tag.of(tag) for begin, end, _ in listed_tags for tag in (begin, end)]
    longest = max(tree.longest for tree in trees)
    prompt = longest - 1
    if asked.thought:
        prompt = max(prompt, *(tokens_read(tags) for tags in listed_tags))
    if asked.ngram:
        prompt = max(prompt, *(len(r.prompt) for r in requests))
    return RuleSizes(
        sets=count_sets(requests),
        prompt=_power(prompt),
        edges=_power(max(len(tree.token) for tree in trees)),
        ends=_power(max(len(tree.ends) for tree in trees)),
        word=_power(longest),
        hits=_power(max(tree.hits for tree in trees)),
        marks=_power(max(map(len, marks), default=1)),
        symbols=_power(max(len(tag.pattern) for tag in tags)) if tags else 0,
        steps=_power(max((len(tag.kinds[0]) for tag in tags), default=1)),
    )


def changed_bytes(
    asked: RuleKinds | None, sets: int, rows: int, longest: int, vocab: int, dtype: torch.dtype
) -> int:
    """Upper bound of the bytes that changing a step's rows takes in addition to its logits.

    asked: None, for no changes, gives 0. sets: sets of rules. longest: tokens of a prompt and a
    sample. dtype: dtype of the logits; rules and changed rows have it too, or float32 if wider.
    """
    if asked is None:
        return 0
    wide = torch.promote_types(dtype, torch.float32).itemsize
    # the copy; a table of biases; a grammar's bans, as bytes and as bools; the functions' copies
    copies = rows * (wide + 2 * asked.grammar + 2 * wide * asked.functions) + sets * wide
    # the kinds of a vocabulary's tokens in the search for two tags
    copies += sets * 2 * torch.int16.itemsize * asked.thought
    # per block: a gathered bias and bans, or bits of tokens that occurred, and penalised rows
    penalties = asked.penalty or asked.counts
    entry = 4 * wide + 4 * torch.int32.itemsize if penalties else 2 * wide
    # and int64 indices of the rows above each one, of its prefix, and of banned sequences
    words = 6 * (WORD_TOKENS + HITS) * asked.words
    prefix = (12 + 4 * asked.thought) * longest * asked.prefix
    numbers = torch.int64.itemsize * (6 * rows + prefix + words)
    return copies * (vocab + 1) + min(rows, BLOCK) * (entry * (vocab + 1) + numbers)


def write_sets(rules: Rules, sets: Mapping[int, tuple[SamplingParams, WordTree]]) -> None:
    """Write sets to their rows of the rules, in one copy to the device."""
    if not sets:
        return
    rows = [_row(rules, index, params, tree) for index, (params, tree) in sets.items()]
    write_rows(
        [
            (field, [*sets], torch.stack([row[name] for row in rows]))
            for name in rows[0]
            for field in [getattr(rules, name)]
        ]
    )


def _row(
    rules: Rules, index: int, params: SamplingParams, tree: WordTree
) -> dict[str, torch.Tensor]:
    """Host tensors of one set, which gets row `index`, by field of `Rules`."""
    vocab, X = rules.bias.shape[1], rules.close.shape[1]
    bias = torch.zeros(vocab, dtype=rules.bias.dtype)
    for token, value in params.logit_bias:
        bias[token] += value
    banned = [*params.suppress_tokens, *(w[0] for w in params.bad_words if len(w) == 1)]
    bias[banned] = -math.inf
    if params.allowed_token_ids is not None:
        other = torch.ones(vocab, dtype=torch.bool)
        other[list(params.allowed_token_ids)] = False
        bias[other] = -math.inf
    begin, end, close = params.thinking_tags or (None, None, ())
    budget = params.max_thinking_tokens
    values = {
        "ngram": params.no_repeat_ngram_size,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "thought": -1 if budget is None else budget,
        "close": [*close, *[-1] * (X - len(close))],
    }
    return (
        {"bias": bias}
        | _tree(rules, index, tree)
        | _of_tags(rules, begin, end)
        | {
            name: torch.tensor(value, dtype=getattr(rules, name).dtype)
            for name, value in values.items()
        }
    )


def _tree(rules: Rules, index: int, tree: WordTree) -> dict[str, torch.Tensor]:
    vocab, E, B = rules.bias.shape[1], rules.word_edges.shape[1], rules.word_ends.shape[1]
    row = torch.tensor([index])
    edges = no_edges(row, E, vocab)[0]
    parent, token = torch.from_numpy(tree.parent), torch.from_numpy(tree.token)
    edges[: len(token)] = word_edge(row, parent, token, E, vocab)
    starts = torch.full((E + 2,), len(tree.ends), dtype=torch.int64)
    starts[: len(tree.starts)] = torch.from_numpy(tree.starts)
    ends = torch.full((B,), -1, dtype=torch.int32)
    ends[: len(tree.ends)] = torch.from_numpy(tree.ends)
    return {"word_edges": edges, "word_starts": starts, "word_ends": ends}


def _of_tags(rules: Rules, begin: Any, end: Any) -> dict[str, torch.Tensor]:
    """Host tensors of the tags of a thought, by field of `Rules`; None for no tags."""
    names = ("tag_kinds", "tag_steps", "tag_length", "rests")
    tensors = {
        name: torch.full(x.shape[1:], -(name == "rests"), dtype=x.dtype)
        for name in names
        for x in [getattr(rules, name)]
    }
    if begin is None:
        return tensors
    for i, tag in enumerate((Tag.of(begin), Tag.of(end))):
        steps, of = tag.kinds
        tensors["tag_steps"][i, :, : len(steps)] = torch.tensor(steps).T
        tensors["tag_kinds"][i, [*of]] = torch.tensor([*of.values()], dtype=torch.int16)
        tensors["tag_length"][i] = len(tag.pattern)
    rests = Tag.of(end).rests
    tensors["rests"][: len(rests)] = torch.tensor(rests, dtype=torch.int32)
    return tensors


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
