"""Tags that begin and end a model's thought, and the tokens that a spent budget forces.

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

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

from csd.models.text.token_bytes import token_bytes
from csd.utils.check import shown

# symbols of a pattern: a state has 32 bits
LONGEST_TAG = 31

Symbols = bytes | tuple[int, ...]
T = TypeVar("T")


class Transition(NamedTuple):
    """Effect of a token on a search; see the module's docstring."""

    k: int = 0
    within: int = 0
    suffix: int = 0
    ends: int = 0
    whole: int = 0


NONE = Transition()


@dataclass(frozen=True)
class Tag:
    """A tag of a thought. `ids` is its own spelling; as a sequence it is these ids."""

    ids: tuple[int, ...]
    text: bytes | None = None  # searched for in the text; None: `ids` are compared
    # tokens that can be a part of the text or overlap it, with their bytes
    tokens: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)
    steps: dict[int, Transition] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, tag: "Tag | tuple[int, ...]") -> "Tag":
        if isinstance(tag, Tag):
            return tag
        ids = tuple(tag)
        return cls(ids, steps={t: step(ids, (t,)) for t in ids})

    @cached_property
    def kinds(self) -> tuple[list[Transition], dict[int, int]]:
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


def step(pattern: Symbols, token: Symbols) -> Transition:
    """The step of a token in the search for a pattern."""
    m, k = len(pattern), len(token)
    within = suffix = ends = 0
    for j in range(1, m):
        if j <= k and token[k - j :] == pattern[:j]:
            suffix |= 1 << j
        if j > k and pattern[j - k : j] == token:
            within |= 1 << j
        if j <= k and token[:j] == pattern[m - j :]:
            ends |= 1 << (m - j)
    places = [i + m for i in range(k - m + 1) if token[i : i + m] == pattern]
    return Transition(k if within else 0, within, suffix, ends, max(places, default=0))


def of_tokenizer(make: Callable[..., T]) -> Callable[..., T]:
    """Decorator that keeps the results of make(tokenizer, *key) as long as the tokenizer lives.

    They are made at each call for an object without a hash or without weak references.
    """
    results: weakref.WeakKeyDictionary[Any, dict[tuple, T]] = weakref.WeakKeyDictionary()

    @wraps(make)
    def get(tokenizer: Any, *key: Any) -> T:
        try:
            made = results.setdefault(tokenizer, {})
        except TypeError:
            made = {}
        if key not in made:
            made[key] = make(tokenizer, *key)
        return made[key]

    return get


@of_tokenizer
def tag_of_text(tokenizer: Any, ids: tuple[int, ...], text: bytes, vocab: int) -> Tag:
    """A tag that is searched for in the text of a vocabulary's first `vocab` tokens."""
    tokens, steps = {}, {}
    for token, read in vocabulary(tokenizer, vocab).items():
        # most tokens have nothing in common with the tag
        if text[:1] in read or text[-1:] in read or read in text:
            taken = step(text, read)
            if taken != NONE:
                tokens[token], steps[token] = read, taken
    return Tag(ids, text, tokens, steps)


@of_tokenizer
def vocabulary(tokenizer: Any, vocab: int) -> dict[int, bytes]:
    """Bytes of the tokens of text among the first `vocab`.

    Special tokens are no text: the name of `<pad>` does not end a tag with its `>`.
    """
    of, special = token_bytes(tokenizer).of, special_ids(tokenizer)
    size = min(vocab, len(tokenizer)) if hasattr(tokenizer, "__len__") else vocab
    text = (t for t in range(size) if t not in special)
    return {t: read for t in text if (read := _read(of, t))}


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


@of_tokenizer
def by_bytes(tokenizer: Any, vocab: int) -> dict[bytes, int]:
    """The first token of a vocabulary with each text."""
    return {x: t for t, x in reversed(vocabulary(tokenizer, vocab).items())}


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


# names of tags around a thought in the chat templates of thinking models
_IN_ANGLES, _IN_BRACKETS = "think|thinking|thought|reason|reasoning|analysis|seed:think", "THINK"
_BEGIN = re.compile(rf"<({_IN_ANGLES})>|\[({_IN_BRACKETS})\]")
# a begin or an end tag; `close` is the slash of an end tag
TAG = re.compile(
    rf"[<\[](?P<close>/?)(?P<name>(?<=[</])(?:{_IN_ANGLES})(?=>)|{_IN_BRACKETS}(?=\]))[>\]]"
)

# begin and end tags as texts
PAIRS = (
    *((f"<{name}>", f"</{name}>") for name in _IN_ANGLES.split("|")),
    *((f"[{name}]", f"[/{name}]") for name in _IN_BRACKETS.split("|")),
)

# the begin tag, the end tag, and the token ids of the closing text
Tags = tuple[Tag | tuple[int, ...], Tag | tuple[int, ...], tuple[int, ...]]

# characters behind which a tag is spelled, unless the tokenizer joins it with all of them
NEIGHBOURS = ("\n", "a", ".")


def find_tags(tokenizer: Any) -> tuple[str, str]:
    """Begin and end tags of a thought in the chat template, else among the added tokens.

    Raises ValueError if neither has a pair of tags.
    """
    template = getattr(tokenizer, "chat_template", None)
    texts = [*template.values()] if isinstance(template, dict) else [template]
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    every = [text for text in texts if isinstance(text, str)]
    for text in [*every, " ".join(added)]:
        for match in _BEGIN.finditer(text):
            begin = match.group(0)
            end = f"{begin[0]}/{begin[1:]}"
            if end in text:
                return begin, end
    raise ValueError(
        "max_thinking_tokens needs the begin and end of a thought, which the chat template does "
        "not contain: pass thinking_tags=('<think>', '</think>')"
    )


def spell(name: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a text. Raises ValueError, naming the argument, if it cannot be tokenized."""
    if tokenizer is None:
        raise ValueError(f"{name} given as strings need a tokenizer: pass tokenizer= or token ids")
    try:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:
        raise ValueError(
            f"{name} must be strings that the tokenizer can encode, got {shown(text)}: {error}"
        ) from error


def spell_behind(name: str, before: str, text: str, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a text behind another; empty if the tokenizer joins or cannot encode them."""
    try:
        alone, both = (spell(name, t, tokenizer) for t in (before, before + text))
    except ValueError:
        return ()
    return both[len(alone) :] if both[: len(alone)] == alone else ()


def spell_tags(tags: tuple[Any, ...], tokenizer: Any, vocab: int) -> Tags:
    """The begin tag, the end tag and the ids of the closing text, which ends with the end tag.

    The closing text, written when the budget is spent, is the last of `tags`, of which there are
    two or three. vocab: number of the model's logits. Raises ValueError for tags that do not fit
    together.
    """
    spelled = [Tag.of(t) if not isinstance(t, str) else _tag(t, tokenizer, vocab) for t in tags]
    begin, end, close = spelled[0], spelled[1], spelled[-1]
    if not begin or not end or _ends_with(begin, end):
        raise ValueError(
            "thinking_tags must have a begin and an end of at least one token, and the begin must "
            f"not end with the end, got token ids {list(begin)} and {list(end)}"
        )
    if not _ends_with(close, end):
        raise ValueError(
            "thinking_tags must have a third entry that ends with the second, as token ids "
            f"{list(end)}, got {shown(list(close))}"
        )
    for tag in (begin, end):
        if len(tag.pattern) > LONGEST_TAG:
            raise ValueError(
                f"thinking_tags must have a begin and an end of at most {LONGEST_TAG} bytes or "
                f"token ids, got {len(tag.pattern)}"
            )
    return begin, end, close.ids


def _tag(text: str, tokenizer: Any, vocab: int) -> Tag:
    alone = spell("thinking_tags", text, tokenizer)
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    if (len(alone) == 1 and alone[0] in added.values()) or special_ids(tokenizer).intersection(
        alone
    ):
        return Tag.of(alone)
    behind = (spell_behind("thinking_tags", b, text, tokenizer) for b in NEIGHBOURS)
    for ids in (*behind, alone):
        # a tokenizer that cannot write the text has the tag's tokens alone
        if ids and joined(ids, tokenizer) == text.encode():
            return tag_of_text(tokenizer, ids, text.encode(), vocab)
    return Tag.of(alone)


def _ends_with(tag: Tag, end: Tag) -> bool:
    if tag.text is not None and end.text is not None:
        return tag.text.endswith(end.text)
    return tag.ids[len(tag) - len(end) :] == end.ids


class ThinkingBudget:
    """Thinking budget of a sample, updated token by token.

    `csd.kernels.verify.rules.rows.forced_tokens` computes the same from whole prefixes.

    opened: True if the prompt leaves a thought open. Other tags of the prompt do not count; one
    that it begins may end in the sample. once: a sample has at most one thought, which its prompt
    leaves open or which it begins with.
    """

    def __init__(
        self, tags: Tags, limit: int, prompt: Sequence[int], opened: bool, once: bool = False
    ):
        self.begin, self.end = Tag.of(tags[0]), Tag.of(tags[1])
        self.close = [*tags[2]]
        self.limit, self.spent = limit, 0
        self.over = False  # with `once`: True if no thought can follow
        self.rest: tuple[int, int] | None = None  # the token that ended it, and symbols before that
        self._rests = self.end.rests
        self._once, self._read = once, 0  # symbols of the begin tag that a sample begins with
        self._began, self._ended = Search(self.begin), Search(self.end)
        # the last tokens, as many as the closing text has
        self._last: tuple[int, ...] = ()
        for token in prompt[-tokens_read(tags) :]:
            self._turn(token)
        self.open = opened

    def copy(self) -> "ThinkingBudget":
        budget = copy(self)
        budget._began, budget._ended = self._began.copy(), self._ended.copy()
        return budget

    def forced(self) -> int:
        """The only token that may come next, or -1 if none is forced."""
        if not self.open or self.spent < self.limit:
            return -1
        begun = self._begun()
        rest = self._rests[self._ended.begun()]
        # an end tag that is begun is completed, unless the closing text is begun
        return self.close[begun] if begun or not self._ended.begun() or rest < 0 else rest

    def openings(self) -> list[int]:
        """Tokens that continue the begin tag, if the sample's thought may still begin."""
        if not self._once or self.open or self.over:
            return []
        return [t for t in self.begin.steps if self._opened(t) is not None]

    def only(self) -> list[int]:
        """Tokens that must or may come next: the rest of the closing text or of the begin tag."""
        tokens: list[int] = []
        walk = self.copy()
        while len(tokens) <= len(self.close) and (token := walk.forced()) >= 0:
            tokens.append(token)
            walk.push(token)
        if tokens or not self._once or self.open or self.over:
            return tokens
        read = 0
        for i, token in enumerate(self.begin.ids):
            if read == self._read:
                return [*self.begin.ids[i:]]
            read += len(self.begin.symbols(token))
        return tokens

    def push(self, token: int) -> None:
        """Update the budget with the sample's next token."""
        self.spent += self.open
        self.rest = None
        if not self._once:
            self._turn(token)
            return
        opened = None if self.open or self.over else self._opened(token)
        self._began.push(token)
        ended = self._ended.push(token)
        self._last = (*self._last, token)[-len(self.close) :]
        if self.open and ended:
            self._finish(token, ended)
        elif not self.open and not self.over:
            self.over = opened is None
            self._read = opened or 0
            self.open = self._read >= len(self.begin.pattern)
            # the token with which the thought begins may also end it
            if self.open and ended > len(self.begin.pattern) - self._tail(token):
                self._finish(token, ended)

    def candidates(self) -> list[int]:
        """Tokens that end the thought and go on after it."""
        steps, state = self.end.steps, self._ended.state
        return [t for t, s in steps.items() if s.whole or s.ends & state]

    @property
    def state(self) -> int:
        """State of the search for the end tag."""
        return self._ended.state

    def _finish(self, token: int, ended: int) -> None:
        self.open, self.over, self.rest = False, True, (token, ended)

    def _tail(self, token: int) -> int:
        """Symbols that the sample has before a token with which its begin tag is complete."""
        return self._read - len(self.begin.symbols(token))

    def _opened(self, token: int) -> int | None:
        """Symbols of the sample after a token that continues the begin tag; None for another."""
        if token not in self.begin.steps:
            return None
        symbols, left = self.begin.symbols(token), self.begin.pattern[self._read :]
        n = min(len(symbols), len(left))
        return self._read + len(symbols) if symbols[:n] == left[:n] else None

    def _begun(self) -> int:
        """Number of tokens of the closing text that the sample already ends with."""
        counts = range(len(self.close) - 1, 0, -1)
        last = [*self._last]
        return next((k for k in counts if last[-k:] == self.close[:k]), 0)

    def _turn(self, token: int) -> None:
        began, ended = self._began.push(token), self._ended.push(token)
        self._last = (*self._last, token)[-len(self.close) :]
        # the last one of the tags that a token completes counts
        if began or ended:
            self.open = began > ended


def tokens_read(tags: Tags) -> int:
    """Number of a prompt's last tokens in which a tag or the closing text may begin."""
    return max(LONGEST_TAG, len(tags[2]))


def forced_places(budget: ThinkingBudget, tokens: Sequence[int]) -> list[bool]:
    """Flags, one per token of a sample: True if its budget, which is used up, forced the token."""
    flags = []
    for token in tokens:
        flags.append(budget.forced() >= 0)
        budget.push(token)
    return flags


def after_thoughts(text: str, inside: bool = False) -> str:
    """The text without its thoughts; a thought that is still open reaches to the end.

    An end tag without a begin tag ends a thought that the prompt opened. inside: True if the prompt
    leaves a thought open, so that a text without an end tag is a thought as a whole.
    """
    answers: list[str] = []
    # name of the open thought's tag; any end tag ends the thought that a prompt opened
    start, name = 0, "" if inside else None
    for tag in TAG.finditer(text):
        if not tag["close"]:
            if name is None:
                answers.append(text[start : tag.start()])
                name = tag["name"]
        elif name is None or name in ("", tag["name"]):
            if name is None:
                answers.clear()
            start, name = tag.end(), None
    if name is None:
        answers.append(text[start:])
    return "".join(answers)
