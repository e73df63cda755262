"""Arguments that change logits before any filter, checked and resolved for a model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from csd.engine.options.grammar import check_grammar, check_one
from csd.engine.options.thinking import Tag, find_tags, spell, spell_behind, spell_tags
from csd.utils.arguments import LARGEST, STEEPEST, check_ids, check_number, check_strings, takes
from csd.utils.check import shown

# characters behind which bad words are tokenized; a tokenizer may join a word with one of them
NEIGHBOURS = ("\n", "a", "(")

# largest no_repeat_ngram_size
LONGEST = 1024
# most tokens of one of `bad_words`, and of all of them
WORD_TOKENS, WORDS_TOKENS = 256, 1 << 16


def check_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and the value added to its logit, sorted by id; -inf bans the token.

    Raises TypeError or ValueError for anything but a dict of ids to numbers, or a tuple of pairs.
    """
    if isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from token ids to numbers, got {shown(value)}")
    pairs = []
    for token, bias in value.items():
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"{name} must have token ids as keys, got {shown(token)}")
        if not 0 <= int(token) <= LARGEST:
            raise ValueError(f"{name} must have token ids as keys, got {shown(token)}")
        if not (isinstance(bias, Real) and bias == -math.inf):
            bias = check_number(f"{name} of token {token}", bias, -STEEPEST, STEEPEST)
        pairs.append((int(token), float(bias)))
    return tuple(sorted(pairs))


def check_words(name: str, value: Any) -> tuple[Any, ...]:
    """Strings and tuples of token ids. Raises TypeError or ValueError for anything else."""
    if hasattr(value, "tolist"):
        # numpy arrays and torch tensors
        value = value.tolist()
    if isinstance(value, str):
        value = [value]
    expected = f"{name} must be strings or lists of token ids"
    if isinstance(value, bytes | Mapping) or not isinstance(value, Collection):
        raise TypeError(f"{expected}, got {shown(value)}")
    words: list[Any] = []
    for word in value:
        if isinstance(word, str):
            words += check_strings(name, word)
        elif isinstance(word, Integral):
            raise TypeError(f"{expected}, got {shown(word)}: write [[{word}]] for one token")
        else:
            ids = tuple(check_ids(name, word, LARGEST))
            if not ids:
                raise ValueError(f"{expected}, got an empty list")
            words.append(ids)
    _check_lengths(name, [word for word in words if not isinstance(word, str)])
    return tuple(words)


def _check_lengths(name: str, words: Collection[tuple[int, ...]]) -> None:
    """Raises ValueError for words whose tables would slow the samples of other requests."""
    longest = max(map(len, words), default=0)
    if longest > WORD_TOKENS:
        raise ValueError(f"{name} must have at most {WORD_TOKENS} tokens each, got {longest}")
    total = sum(map(len, words))
    if total > WORDS_TOKENS:
        raise ValueError(f"{name} must have at most {WORDS_TOKENS} tokens in all, got {total}")


def check_id_list(name: str, value: Any) -> tuple[int, ...]:
    """Distinct token ids in ascending order. Raises TypeError or ValueError."""
    return tuple(sorted(set(check_ids(name, value, LARGEST))))


def check_allowed(name: str, value: Any) -> tuple[int, ...]:
    """Distinct token ids in ascending order, at least one."""
    ids = check_id_list(name, value)
    if not ids:
        raise ValueError(f"{name} must have at least one token id, got {shown(value)}")
    return ids


def check_functions(name: str, value: Any) -> tuple[Callable, ...]:
    """Functions of token ids and logits. Raises TypeError naming the first that is not one."""
    # transformers' LogitsProcessorList is callable too, and passes more than two arguments on
    listed = tuple(value) if isinstance(value, list | tuple) else (value,)
    for function in listed:
        if isinstance(function, type) or not takes(function, 2):
            raise TypeError(
                f"{name} must be a function of token ids and logits, or a list of such functions, "
                f"got {shown(function)}"
            )
    return listed


def check_tags(name: str, value: Any) -> tuple[Any, ...]:
    """Two or three strings or tuples of token ids. Raises TypeError or ValueError."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Collection) or len(value) not in (2, 3):
        raise TypeError(
            f"{name} must be the begin and the end of a thought, as strings or lists of token "
            "ids, and optionally the text that ends it when the budget is spent, got "
            f"{shown(value)}"
        )
    tags = tuple(
        tag if isinstance(tag, str | Tag) else check_words(name, [tag])[0] for tag in value
    )
    if any(not tag for tag in tags):
        raise ValueError(f"{name} must not be empty, got {shown(value)}")
    if tags[0] == tags[1]:
        raise ValueError(f"{name} must have different begin and end, got {shown(value)}")
    return tags


def without_ends(words: tuple[Any, ...], generation_config: Any) -> tuple[Any, ...]:
    """Bad words of a generation config; transformers ignores one that is a single end token."""
    ends = check_ids("eos_token_id", getattr(generation_config, "eos_token_id", None), LARGEST)
    return tuple(word for word in words if word not in {(end,) for end in ends})


def row_params(rules: Mapping[str, Any], tokenizer: Any, vocab: int) -> dict[str, Any]:
    """Checked options that change logits, as `SamplingParams` has them for a model."""
    params = dict(rules)
    params["bad_words"] = _spelled(rules["bad_words"], tokenizer)
    tags = rules["thinking_tags"]
    if rules["max_thinking_tokens"] is not None:
        params["thinking_tags"] = spell_tags(tags or find_tags(tokenizer), tokenizer, vocab)
    elif tags is not None:
        raise ValueError("thinking_tags needs max_thinking_tokens, which is not given")
    check_one(params)
    check_grammar(params, tokenizer, vocab)
    check_vocabulary(
        {
            "logit_bias": [token for token, _ in params["logit_bias"]],
            "bad_words": [token for word in params["bad_words"] for token in word],
            "thinking_tags": [t for tag in params["thinking_tags"] or () for t in tag],
            "allowed_token_ids": params["allowed_token_ids"] or (),
            "suppress_tokens": params["suppress_tokens"],
        },
        vocab,
    )
    return params


def _spelled(words: tuple[Any, ...], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word; a string has those of itself and of itself behind a space.

    Both are tokenized behind other characters, as words in a text are.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            spellings[word] = None
            continue
        texts = (word, " " + word.lstrip())
        if not any(spell("bad_words", text, tokenizer) for text in texts):
            raise ValueError(
                f"bad_words must be strings with at least one token, got {shown(word)}"
            )
        spelled = [
            spell_behind("bad_words", before, text, tokenizer)
            for text in texts
            for before in NEIGHBOURS
        ]
        if not any(spelled):
            raise ValueError(
                "bad_words must be strings that the tokenizer separates from a line break, a "
                f"letter or a bracket before them, got {shown(word)}: pass its token ids"
            )
        spellings |= dict.fromkeys(filter(None, spelled))
    _check_lengths("bad_words", spellings)
    return tuple(spellings)


def check_vocabulary(ids: Mapping[str, Sequence[int]], vocab: int) -> None:
    """Raises ValueError for token ids, by argument, that exceed the model's vocabulary.

    Ids of tokenizers and of transformers' lists may do so.
    """
    for name, tokens in ids.items():
        if tokens and max(tokens) >= vocab:
            raise ValueError(f"{name} must lie in the vocabulary of {vocab}, got {max(tokens)}")
