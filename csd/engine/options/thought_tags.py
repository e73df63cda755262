"""Tags of a thought as patterns that are searched for token by token.

A tag is searched for in the text, because the tokens around it may join with it: `).</`, `think`,
`>The`. A tag that is one special token, or is given as token ids, is compared with tokens. Both are
a pattern of symbols, bytes or token ids, and every token is a short list of symbols.

The state of a search is a word D, whose bit j is set if the last j symbols are the pattern's first
j, for 0 < j < m. A token of k symbols changes it to

    D' = ((D << k) & within) | suffix

within: bits j of the parts of the pattern that end at j and equal the whole token. suffix: bits j
of the beginnings of the pattern that end the token. Steps of this form can be joined to one of the
same form, so states of a whole prefix need log2(m) operations on all of its tokens at once.

The token completes the pattern if D & ends is not 0, whose bit m - i is set if the token's first i
symbols end the pattern, or if it contains the whole pattern, last up to its symbol `whole`.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from csd.models.text.token_bytes import token_bytes

# symbols of a pattern: a state has 32 bits
LONGEST_TAG = 31

Symbols = bytes | tuple[int, ...]


class Step(NamedTuple):
    """Effect of a token on a search; see the module's docstring."""

    k: int = 0
    within: int = 0
    suffix: int = 0
    ends: int = 0
    whole: int = 0


NONE = Step()


@dataclass(frozen=True)
class Tag:
    """A tag of a thought. `ids` is its own spelling; as a sequence it is these ids."""

    ids: tuple[int, ...]
    text: bytes | None = None  # searched for in the text; None: `ids` are compared
    # tokens that can be a part of the text or overlap it, with their bytes
    tokens: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)
    steps: dict[int, Step] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, tag: "Tag | tuple[int, ...]") -> "Tag":
        if isinstance(tag, Tag):
            return tag
        ids = tuple(tag)
        return cls(ids, steps={t: step(ids, (t,)) for t in ids})

    @classmethod
    def of_text(cls, ids: tuple[int, ...], text: bytes, tokenizer: Any, vocab: int) -> "Tag":
        """A tag that is searched for in the text of a vocabulary's first `vocab` tokens."""
        made = _TAGS.setdefault(tokenizer, {})
        if (ids, text, vocab) not in made:
            tokens, steps = {}, {}
            for token, read in vocabulary(tokenizer, vocab).items():
                # most tokens have nothing in common with the tag
                if text[:1] in read or text[-1:] in read or read in text:
                    taken = step(text, read)
                    if taken != NONE:
                        tokens[token], steps[token] = read, taken
            made[ids, text, vocab] = cls(ids, text, tokens, steps)
        return made[ids, text, vocab]

    @cached_property
    def kinds(self) -> tuple[list[Step], dict[int, int]]:
        """Different steps, the first of which has no effect, and the index of each token's."""
        index = {NONE: 0}
        of = {t: index.setdefault(s, len(index)) for t, s in self.steps.items()}
        return [*index], of

    @property
    def pattern(self) -> Symbols:
        return self.ids if self.text is None else self.text

    def symbols(self, token: int) -> Symbols:
        """Symbols of a token that has a step."""
        return (token,) if self.text is None else self.tokens[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def rests(self) -> list[int]:
        """Token that continues the tag after each number of its symbols: the longest that does.

        -1 for a tag of token ids.
        """
        if self.text is None:
            return [-1] * len(self.ids)
        tokens = []
        for begin in range(len(self.text)):
            fits = [t for t, read in self.tokens.items() if self.text.startswith(read, begin)]
            tokens.append(max(fits, key=lambda t: (len(self.tokens[t]), -t), default=-1))
        return tokens


class Search:
    """State of the search for a tag, token by token."""

    def __init__(self, tag: Tag, state: int = 0):
        self.tag, self.state = tag, state

    def copy(self) -> "Search":
        return Search(self.tag, self.state)

    def push(self, token: int) -> int:
        """Reads a token; the number of its symbols up to where the tag is complete, else 0."""
        step = self.tag.steps.get(token, NONE)
        ends, length = self.state & step.ends, len(self.tag.pattern)
        self.state = ((self.state << step.k) & step.within) | step.suffix
        lowest = (ends & -ends).bit_length() - 1
        return max(step.whole, length - lowest if ends else 0)

    def begun(self) -> int:
        """Number of the tag's symbols with which the text ends."""
        return max(self.state.bit_length() - 1, 0)


def step(pattern: Symbols, token: Symbols) -> Step:
    """The step of a token in the search for a pattern."""
    m, k = len(pattern), len(token)
    within = suffix = ends = 0
    for j in range(1, m):
        if j < k and token[k - j :] == pattern[:j]:
            suffix |= 1 << j
        if j == k and token == pattern[:j]:
            suffix |= 1 << j
        if j > k and pattern[j - k : j] == token:
            within |= 1 << j
        if j <= k and token[:j] == pattern[m - j :]:
            ends |= 1 << (m - j)
    places = [i + m for i in range(k - m + 1) if token[i : i + m] == pattern]
    return Step(k if within else 0, within, suffix, ends, max(places, default=0))


_TAGS: "weakref.WeakKeyDictionary[Any, dict[tuple, Tag]]" = weakref.WeakKeyDictionary()
_VOCABULARIES: "weakref.WeakKeyDictionary[Any, dict[int, dict[int, bytes]]]"
_VOCABULARIES = weakref.WeakKeyDictionary()
_BY_BYTES: "weakref.WeakKeyDictionary[Any, dict[int, dict[bytes, int]]]"
_BY_BYTES = weakref.WeakKeyDictionary()


def vocabulary(tokenizer: Any, vocab: int) -> dict[int, bytes]:
    """Bytes of the tokens of text among the first `vocab`; read once per tokenizer.

    Special tokens are no text: the name of `<pad>` does not end a tag with its `>`.
    """
    made = _VOCABULARIES.setdefault(tokenizer, {})
    if vocab not in made:
        of = token_bytes(tokenizer).of
        size = min(vocab, len(tokenizer)) if hasattr(tokenizer, "__len__") else vocab
        special = special_ids(tokenizer)
        text = (t for t in range(size) if t not in special)
        made[vocab] = {t: read for t in text if (read := _read(of, t))}
    return made[vocab]


def special_ids(tokenizer: Any) -> set[int]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {t for t, token in added.items() if token.special}
    return special.union(getattr(tokenizer, "all_special_ids", None) or ())


def _read(of: Any, token: int) -> bytes | None:
    try:
        return of(token)
    # a tokenizer without a length may have fewer tokens than the model
    except (IndexError, KeyError, ValueError):
        return None


def by_bytes(tokenizer: Any, vocab: int) -> dict[bytes, int]:
    """The first token of a vocabulary with each text, made once per tokenizer."""
    made = _BY_BYTES.setdefault(tokenizer, {})
    if vocab not in made:
        made[vocab] = {x: t for t, x in reversed(vocabulary(tokenizer, vocab).items())}
    return made[vocab]


def split(text: bytes, tokens: dict[bytes, int]) -> list[int]:
    """Tokens of `by_bytes` whose bytes are those of the text, longest first; [] without any."""
    ids = []
    while text:
        size = next((n for n in range(len(text), 0, -1) if text[:n] in tokens), 0)
        if not size:
            return []
        ids.append(tokens[text[:size]])
        text = text[size:]
    return ids


def joined(ids: Sequence[int], tokenizer: Any) -> bytes | None:
    """Bytes of tokens inside a text, None if the vocabulary does not show them."""
    of = token_bytes(tokenizer).of
    read = [of(t) for t in ids]
    return None if None in read else b"".join(x for x in read if x is not None)
