"""Tokens that a grammar allows, from a whole prefix, and a tokenizer of several letters a token."""

import math

import numpy as np
import torch
from transformers import LogitsProcessor

END = 2
PIECES = [
    "<0>",
    "<1>",
    "<end>",
    *"abcdefghijlnrstu",
    *"0123456789",
    *'{}[]":, -.!?',
    "ab",
    "abc",
    "bc",
    "cd",
    "de",
    '{"',
    '":',
    '", "',
    '"}',
    "true",
    "false",
    "null",
    "12",
    "1.5",
    "é",
    "\n",
]


class Pieces:
    """ids without a piece are no text."""

    chat_template = None
    eos_token_id = END
    all_special_ids = (0, 1, END)

    def __len__(self):
        return len(PIECES)

    def __call__(self, text, add_special_tokens=True):
        found = []
        while text:
            piece = max((p for p in PIECES[3:] if text.startswith(p)), key=len)
            found.append(PIECES.index(piece))
            text = text[len(piece) :]
        return {"input_ids": found}

    def decode(self, tokens, skip_special_tokens=True):
        first = 3 if skip_special_tokens else 0
        return "".join(PIECES[t] for t in tokens if first <= t < len(PIECES))


# over what prompts are made of, and over what no prompt has
GRAMMARS = [
    dict(regex="[a-f]+"),
    dict(regex="(abc|abd|b.)+"),
    dict(regex="a*b?[c-f]{2,}"),
    dict(regex="abcde"),
    dict(regex="(true|false|null)!"),
    dict(grammar='start: "[" start "]" | /[a-d]/'),
    dict(grammar='start: item+\nitem: "ab" | "ba" | "c" /[0-9]/'),
    dict(json_schema={"type": "array", "items": {"type": "boolean"}}),
    dict(json_schema={"enum": ["abc", "abd", 12, None]}),
    dict(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
]


class Grammar(LogitsProcessor):
    """A fresh matcher reads the whole text behind each prefix.

    thought: what begins and what ends one, of samples that may think before their text. forced:
    True if tokens are given: behind one that the grammar does not allow, or that ends the text, it
    allows all.
    """

    def __init__(self, given, prompt_len, vocab, ends, thought=None, forced=False):
        from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

        ((name, value),) = given.items()
        made = {"regex": LLMatcher.grammar_from_regex, "grammar": LLMatcher.grammar_from_lark}
        if name == "json_schema":
            spaces = {"whitespace_pattern": "[ \\t\\n]{0,40}"}
            self.grammar = LLMatcher.grammar_from_json_schema(value, spaces)
        else:
            self.grammar = made[name](value)
        self.reader = LLTokenizer(TokenizerWrapper(_Bytes(vocab)), n_vocab=vocab)
        self.prompt_len, self.vocab, self.ends, self.thought = prompt_len, vocab, ends, thought
        self.forced = forced

    def allowed(self, ids):
        """[V] bool behind ids."""
        from llguidance import LLMatcher

        prompt, own, opening = ids[: self.prompt_len], ids[self.prompt_len :], -1
        if self.thought is not None:
            begin, end = self.thought
            start = thought_start(prompt, own, begin)
            if start is not None:
                over = thought_end(prompt, own, start, end)
                if over is None:
                    return torch.ones(self.vocab, dtype=torch.bool)
                own = own[over:]
            elif own == begin[: len(own)]:
                opening = begin[len(own)]
        found = torch.zeros(self.vocab, dtype=torch.bool)
        matcher = LLMatcher(self.reader, self.grammar, log_level=0)
        reads = all(
            # drawn tokens are allowed
            (not self.forced or token in self.listed(matcher))
            and matcher.try_consume_tokens([token]) == 1
            for token in own
        )
        ended = any(token in (END, *self.ends) for token in own)
        if self.forced and opening < 0 and (ended or not reads):
            return torch.ones(self.vocab, dtype=torch.bool)
        assert reads or opening >= 0
        if reads:
            found[self.listed(matcher)] = True
        if opening >= 0:
            found[opening] = True
        found[list(self.ends)] = reads and matcher.is_accepting()
        return found

    def listed(self, matcher):
        """Tokens by the bits; where the text can go on in one way, only those of its spelling."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocab].nonzero()[0]

    def __call__(self, input_ids, scores):
        return scores.masked_fill(~self.allowed(input_ids[0].tolist()), -math.inf)


def ends_in(prompt, begin):
    """True if a prompt leaves a thought open; without a chat template, at its very end alone."""
    return prompt[-len(begin) :] == begin


def thought_start(prompt, own, begin):
    """Number of tokens of a sample before its one thought; None without a thought."""
    texts = [Pieces().decode(ids, skip_special_tokens=False) for ids in (prompt, begin)]
    if ends_in(prompt, begin) or (texts[1] and texts[0].rstrip().endswith(texts[1])):
        return 0
    return len(begin) if own[: len(begin)] == begin else None


def thought_end(prompt, own, start, end):
    """Number of tokens of a sample before its text; None within the thought."""
    for i in range(start + 1, len(own) + 1):
        if (prompt + own[:i])[-len(end) :] == end:
            return i
    return None


class _Bytes:
    eos_token_id, bos_token_id, special_token_ids = END, None, [0, 1, END]

    def __init__(self, vocab):
        special = {0, 1, END, *range(len(PIECES), vocab)}
        self.tokens = [
            b"\xff<%d>" % i if i in special else PIECES[i].encode() for i in range(vocab)
        ]

    def __call__(self, text):
        return Pieces()(text.decode() if isinstance(text, bytes) else text)["input_ids"]
