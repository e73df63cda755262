"""Arguments that change logits before any filter: declared, checked and resolved for a model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, TypedDict

from csd.engine.options.checks import whole
from csd.engine.options.grammar import check_grammar, check_one, check_schema, check_text
from csd.engine.options.thinking import Tag, find_tags, spell, spell_behind, spell_tags
from csd.utils.arguments import (
    LARGEST,
    STEEPEST,
    Option,
    check_ids,
    check_number,
    check_strings,
    takes,
)
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


class LogitOptions(TypedDict, total=False):
    """Arguments that change logits before the filters, depending on a sample's own prefix only."""

    logit_bias: Annotated[
        dict[int, float] | None,
        Option(
            None,
            "{token id: value} to add to the model's logits; -inf bans a token. This option and "
            "the following ones, up to `grammar`, change a sample's logits depending only on its "
            "own prefix, before the filters; drafts do not change what is sampled",
            check_bias,
            off=(),
            fields="logit_bias",
        ),
    ]
    bad_words: Annotated[
        str | list[str] | list[list[int]] | None,
        Option(
            None,
            "strings or lists of token ids that must not be sampled. In a list of several tokens, "
            "the last one is banned after the others. A string is banned with and without a space "
            "before it",
            check_words,
            list,
            flag_help="a string that must not be sampled, with and without a space before it",
            off=(),
            config="bad_words_ids",
            processor="NoBadWordsLogitsProcessor.bad_word_ids",
            fields="bad_words",
        ),
    ]
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            None,
            "token ids that may be sampled; all others are banned, end tokens included",
            check_allowed,
            fields="allowed_token_ids",
        ),
    ]
    suppress_tokens: Annotated[
        list[int] | None,
        Option(
            None,
            "token ids that must not be sampled",
            check_id_list,
            off=(),
            config="suppress_tokens",
            processor="SuppressTokensLogitsProcessor.suppress_tokens",
            fields="suppress_tokens",
        ),
    ]
    no_repeat_ngram_size: Annotated[
        int | None,
        whole(
            None,
            "size of n-grams that must not occur twice in prompt and sample; 0 is off",
            high=LONGEST,
            off=0,
            config="no_repeat_ngram_size",
            processor="NoRepeatNGramLogitsProcessor.ngram_size",
            fields="no_repeat_ngram_size",
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(
            None,
            "value subtracted from a token's logit for each time the sample already contains it; "
            "0 is off",
            partial(check_number, low=-STEEPEST, high=STEEPEST),
            float,
            off=0.0,
            fields="frequency_penalty",
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Option(
            None,
            "value subtracted from the logits of tokens that the sample already contains; 0 is off",
            partial(check_number, low=-STEEPEST, high=STEEPEST),
            float,
            off=0.0,
            fields="presence_penalty",
        ),
    ]
    logits_processor: Annotated[
        Callable | Sequence[Callable] | None,
        Option(
            None,
            "a LogitsProcessor of transformers, a function of token ids [rows, length] and logits "
            "[rows, vocabulary] that returns new logits, or a list of these. Rows are possible "
            "prefixes of samples, in any order: the result for a row may depend only on that row",
            check_functions,
            off=(),
        ),
    ]
    max_thinking_tokens: Annotated[
        int | None,
        whole(
            None,
            "maximum number of tokens of a thought; then the tokens that end the thought are "
            "forced, and `out[i].forced` marks them",
            high=LARGEST,
            flag_help="maximum number of tokens of a thought; then the tokens that end the thought "
            "are forced",
            fields="max_thinking_tokens",
        ),
    ]
    thinking_tags: Annotated[
        Sequence[str | Sequence[int]] | None,
        Option(
            None,
            "begin and end of a thought, as strings or lists of token ids; by default those of "
            "the chat template. A third entry is the text written to end a thought, which must "
            "itself end with the end",
            check_tags,
            fields="thinking_tags",
        ),
    ]
    json_schema: Annotated[
        dict | str | type | None,
        Option(
            None,
            "JSON schema of the texts: a dict, a JSON string or a pydantic class. End tokens are "
            "allowed only where the text is complete. This option, `regex` and `grammar` need "
            "llguidance (`pip install 'llguidance>=1.0'`)",
            check_schema,
            fields="response_format",
        ),
    ]
    regex: Annotated[
        str | None,
        Option(None, "regular expression that the texts match", check_text, str, fields="regex"),
    ]
    grammar: Annotated[
        str | None,
        Option(None, "grammar of the texts, in Lark syntax", check_text, str, fields="grammar"),
    ]
