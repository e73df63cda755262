"""Rules of samples beyond filters, as tensors: one row for each different set of rules.

Slot s has the row `of[s]`. Tensors are reused from call to call if their sizes allow it, so that a
replayed step reads the rules of the current call.
"""

from dataclasses import dataclass

import torch

from csd.state.record import allocate, tensor

# stands for any token in a pattern
ANY = -2


@dataclass(frozen=True, slots=True)
class RuleKinds:
    """Kinds of changes that the rows of a call can need."""

    bias: bool = False  # bias, or bans that depend on nothing
    words: bool = False  # banned sequences of several tokens
    ngram: int = 0  # tokens of the longest n-gram that must not be repeated
    early: bool = False  # end tokens are banned before `min_new`
    penalty: bool = False  # repetition penalty before other changes; else verification applies it
    counts: bool = False  # presence or frequency penalty
    thought: bool = False  # a budget of thought
    functions: bool = False  # functions that run on the host
    grammar: bool = False

    @property
    def host(self) -> bool:
        """True if rows are changed by code on the host."""
        return self.functions or self.grammar

    @property
    def prefix(self) -> bool:
        """True if rows' whole prefixes are read."""
        return self.words or self.ngram > 0 or self.counts or self.thought


@dataclass(slots=True)
class Rules:
    """S slots, R sets of rules, V vocabulary, P tokens of a prompt.

    A set's banned sequences of several tokens are a tree over all their tokens but the last, from
    the second-last backwards: E edges, of which edge e leads to node e + 1 (node 0 is the root),
    and B ends, the last tokens in order of the nodes at which they are banned.
    """

    word: int  # tokens of the longest banned sequence
    word_hits: int  # most tokens that banned sequences ban in a row
    of: torch.Tensor = tensor("S", torch.int64)  # the set of the slot's sample
    prompt: torch.Tensor = tensor("S P", fill=-1)  # its prompt's end, right-aligned, -1 before
    opened: torch.Tensor = tensor("S", torch.bool)  # whether it leaves a thought open
    # 1 + the sample's first place that allowed no token, negative if a logit there was NaN or +inf;
    # else 0
    empty: torch.Tensor = tensor("S")
    bias: torch.Tensor = tensor("R V", None)  # added to logits: -inf is a ban
    # keys by `word_edge`, ascending over all rows; in a new record those of `no_edges`
    word_edges: torch.Tensor = tensor("R E", torch.int64)
    # the first end of each node, and of one more
    word_starts: torch.Tensor = tensor("R E+2", torch.int64)
    word_ends: torch.Tensor = tensor("R B", fill=-1)
    # tokens of an n-gram that must not be repeated, 0 is off
    ngram: torch.Tensor = tensor("R", torch.int64)
    presence: torch.Tensor = tensor("R", torch.float64)
    frequency: torch.Tensor = tensor("R", torch.float64)
    thought: torch.Tensor = tensor("R", torch.int64, -1)  # most tokens of thought, -1 is off
    # the tags that begin and end a thought, as `csd.kernels.verify.rules.rows` searches for
    # them; K is V, or 1 without a budget of thought
    tag_kinds: torch.Tensor = tensor("R 2 K", torch.int16)  # index of a token's step
    tag_steps: torch.Tensor = tensor("R 2 5 C")  # the different steps, by field
    tag_length: torch.Tensor = tensor("R 2", torch.int64, 1)  # symbols of each tag
    close: torch.Tensor = tensor("R X", fill=-1)  # tokens that end it, left-aligned, -1 after
    # the token that continues the end tag after each number of its symbols, or -1
    rests: torch.Tensor = tensor("R Y", fill=-1)

    @classmethod
    def empty_of(
        cls,
        slots: int,
        vocab: int,
        *,
        sets: int,
        prompt: int,
        words: tuple[int, int, int, int],
        marks: int,
        tags: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Rules":
        """Returns rules that change nothing; marks: X; tags: Y, which is 0 without thoughts, and C.

        words: E, B, `word` and `word_hits`. dtype: that of the changed logits.
        """
        E, B, word, hits = words
        sizes = {"S": slots, "P": prompt, "R": sets, "V": vocab, "E": E, "B": B, "X": marks}
        sizes |= {"K": vocab if tags[0] else 1, "C": tags[1], "Y": max(tags[0], 1)}
        made = allocate(cls, sizes, device, dtype, filled=True)
        made["word_edges"] = no_edges(torch.arange(sets, device=device), E, vocab)
        return cls(**made, word=word, word_hits=hits)


def word_edge(
    row: torch.Tensor, node: torch.Tensor, token: torch.Tensor, edges: int, vocab: int
) -> torch.Tensor:
    """Key of the edge from a node by a token in the tree of set `row`, which has room for `edges`.

    Keys rise with the row, then with the node, then with the token.
    """
    return (row * (edges + 1) + node) * (vocab + 1) + token


def no_edges(row: torch.Tensor, edges: int, vocab: int) -> torch.Tensor:
    """[R, E] int64: keys of rows [R] that no edge has, after those of the row's edges."""
    last = torch.full_like(row, edges)
    return word_edge(row, last, torch.full_like(row, vocab), edges, vocab)[:, None].repeat(1, edges)
