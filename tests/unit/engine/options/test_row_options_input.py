"""Options beyond filters as they are given: strings, configs and functions, and what is refused."""

import logging
import math

import pytest
import torch
import transformers
from helpers.models.scripted import Letters, PrefixSum, engine
from row_option_cases import PROMPT, TAGS, NoEven, engine_of

import csd


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda ids, x: None, r"must return logits of shape \[1, 97\], got None"),
        (lambda ids, x: x[0], r"must return logits of shape \[1, 97\], got shape \[97\]"),
        (lambda ids, x: x > 0, "must return floating-point logits, got torch.bool"),
    ],
    ids=["none", "shape", "mask"],
)
def test_what_a_function_returns_is_checked(function, message):
    with pytest.raises(TypeError, match=f"logits_processor {message}"):
        engine_of("cpu").generate(PROMPT, max_new_tokens=2, logits_processor=function)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_a_function_gives_is_not_the_models_fault(value):
    with pytest.raises(
        FloatingPointError, match=r"^logits_processor or the model returned NaN or inf"
    ):
        engine_of("cpu").generate(
            PROMPT, max_new_tokens=2, logits_processor=lambda ids, x: torch.full_like(x, value)
        )


def test_functions_on_a_gpu_are_logged(caplog):
    from csd.engine.rules import changes as logit_changes

    logit_changes.log_uncaptured.cache_clear()
    with caplog.at_level(logging.WARNING, "csd"):
        logit_changes.log_uncaptured(torch.device("cpu").type)
        assert not caplog.records
        for device in ("cuda", "cuda:1"):
            logit_changes.log_uncaptured(torch.device(device).type)
    assert len(caplog.records) == 1 and "static=False" in caplog.text


def test_strings_are_spelled():
    e = engine(PrefixSum(), Letters())
    tokens = [Letters.alphabet.index(c) for c in "ab"]
    out = csd.generate(e, "abab", num_samples=8, max_new_tokens=40, bad_words="ab", seed=0)
    assert all("ab" not in text for text in out.texts)
    same = csd.generate(
        e, "abab", num_samples=8, max_new_tokens=40, bad_words=[tokens, [26, *tokens]], seed=0
    )
    assert same.tokens == out.tokens

    class NoSpaces(Letters):
        def __call__(self, text, add_special_tokens=True):
            return super().__call__(text.strip())

    with pytest.raises(
        ValueError, match="bad_words must be strings with at least one token, got ' '"
    ):
        csd.generate(e, "ab", bad_words=["a", " "], tokenizer=NoSpaces())
    with pytest.raises(ValueError, match="bad_words given as strings need a tokenizer"):
        csd.generate(engine(PrefixSum()), [1], bad_words=["ab"])


def test_a_generation_config_asks_for_bans():
    asked = dict(no_repeat_ngram_size=2, suppress_tokens=[3, 4], bad_words_ids=[[5], [6, 7], [9]])
    config = transformers.GenerationConfig(eos_token_id=9, **asked)
    followed = engine(PrefixSum(), generation_config=config)
    options = dict(num_samples=4, max_new_tokens=30, seed=1)
    want = csd.generate(
        engine(PrefixSum()),
        [1, 2],
        no_repeat_ngram_size=2,
        suppress_tokens=[3, 4],
        bad_words=[[5], [6, 7]],
        stop_token_ids=[9],
        **options,
    )
    assert csd.generate(followed, [1, 2], **options).tokens == want.tokens
    freed = csd.generate(
        followed, [1, 2], no_repeat_ngram_size=0, suppress_tokens=[], bad_words=[], **options
    )
    want = csd.generate(engine(PrefixSum()), [1, 2], stop_token_ids=[9], **options)
    assert freed.tokens == want.tokens


REFUSED = {
    "bias-list": (dict(logit_bias=[1]), TypeError, "logit_bias must be a dict from token ids"),
    "bias-key": (dict(logit_bias={"a": 1}), TypeError, "logit_bias must have token ids as keys"),
    "bias-value": (
        dict(logit_bias={1: "a"}),
        TypeError,
        "logit_bias of token 1 must be a number, got 'a'",
    ),
    "bias-nan": (dict(logit_bias={1: math.nan}), ValueError, "logit_bias of token 1 must lie in"),
    "bias-inf": (dict(logit_bias={1: math.inf}), ValueError, "logit_bias of token 1 must lie in"),
    "bias-vocab": (dict(logit_bias={97: 1}), ValueError, "logit_bias must lie in the vocabulary"),
    "words-ids": (dict(bad_words=[5, 6]), TypeError, r"got 5: write \[\[5\]\]"),
    "words-empty": (dict(bad_words=[[]]), ValueError, "bad_words must be strings or lists"),
    "words-vocab": (dict(bad_words=[[1, 97]]), ValueError, "bad_words must lie in the vocab"),
    "allowed-none": (dict(allowed_token_ids=[]), ValueError, "allowed_token_ids must have at"),
    "allowed-vocab": (dict(allowed_token_ids=[97]), ValueError, "allowed_token_ids must lie in"),
    "suppressed": (dict(suppress_tokens="a"), TypeError, "suppress_tokens must be a list of"),
    "ngram": (dict(no_repeat_ngram_size=-1), ValueError, "no_repeat_ngram_size must be at least"),
    "frequency": (dict(frequency_penalty="a"), TypeError, "frequency_penalty must be a number"),
    "presence": (dict(presence_penalty=math.inf), ValueError, "presence_penalty must lie in"),
    "class": (dict(logits_processor=NoEven), TypeError, "logits_processor must be a function of"),
    "arguments": (dict(logits_processor=lambda x: x), TypeError, "logits_processor must be a func"),
    "thought": (dict(max_thinking_tokens=-1), ValueError, "max_thinking_tokens must be at least 0"),
    "thought-tags": (dict(max_thinking_tokens=3), ValueError, "pass thinking_tags=.'<think>', "),
    "tags-alone": (dict(thinking_tags=TAGS), ValueError, "thinking_tags needs max_thinking_to"),
    "tags-one": (
        dict(max_thinking_tokens=3, thinking_tags=[[3]]),
        TypeError,
        "thinking_tags must be the",
    ),
    "tags-equal": (
        dict(max_thinking_tokens=3, thinking_tags=[[3], [3]]),
        ValueError,
        "thinking_tags must have dif",
    ),
    "tags-begin": (
        dict(max_thinking_tokens=3, thinking_tags=[[5, 3], [3]]),
        ValueError,
        r"the begin must not end with the end, got token ids \[5, 3\] and \[3\]",
    ),
    "tags-end": (
        dict(max_thinking_tokens=3, thinking_tags=[[3], [4], [4, 5]]),
        ValueError,
        r"thinking_tags must have a third entry that ends with the second, as token ids \[4\], got",
    ),
    "tags-text": (
        dict(max_thinking_tokens=3, thinking_tags=["a", "b"]),
        ValueError,
        "need a tokenizer",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        engine_of("cpu").generate(PROMPT, max_new_tokens=1, **options)
