"""Options beyond filters: tokens are those of a loop over transformers' processors."""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
import transformers
from helpers.models.checkpoints import VOCAB, build
from helpers.oracles import oracle
from helpers.runs.engine_cases import PROMPTS, assert_same_samples
from helpers.targets import few, slow
from row_option_cases import PROMPT, TAGS, NoEven, engine_of, model_and_twin

import csd

LENGTH = 16
COOL = dict(temperature=0.6)


def halved_after_three(ids, logits):
    """A function of rows: what follows token 3 is as likely as its square root."""
    return torch.where(ids[:, -1:] == 3, logits / 2, logits)


SETTINGS = {
    "bias": dict(logit_bias={3: 2.5, 17: 1.25, 9: -math.inf}, **COOL),
    "bad-words": dict(bad_words=[[5], [17, 3], [3, 60, 17]], **COOL),
    "allowed": dict(allowed_token_ids=[3, 5, 9, 17, 60, 61], temperature=1.5),
    "suppressed": dict(suppress_tokens=[3, 5, 96], top_k=5, **COOL),
    "ngram": dict(no_repeat_ngram_size=2, temperature=0.3),
    "ngram-1": dict(no_repeat_ngram_size=1, temperature=0),
    # longer than every prefix
    "ngram-long": dict(no_repeat_ngram_size=60, temperature=0.3),
    "counts": dict(frequency_penalty=0.8, presence_penalty=0.5, temperature=0.4),
    "counts-greedy": dict(frequency_penalty=1.5, presence_penalty=-0.5, temperature=0),
    "function": dict(logits_processor=halved_after_three, **COOL),
    "processors": dict(
        logits_processor=transformers.LogitsProcessorList([NoEven(), halved_after_three]),
        temperature=0.9,
        min_p=0.02,
    ),
    "thought": dict(
        max_thinking_tokens=2, thinking_tags=TAGS, logit_bias={3: 3.0, 17: 1.0}, temperature=1.0
    ),
    "thought-closed": dict(
        max_thinking_tokens=4,
        thinking_tags=(*TAGS, (5, 6, 17, 9)),
        logit_bias={3: 4.0},
        temperature=0.8,
        frequency_penalty=0.2,
        logits_processor=[NoEven()],
    ),
    "thought-long": dict(
        max_thinking_tokens=1, thinking_tags=(*TAGS, (*range(20, 60), 17, 9)), temperature=0.8
    ),
    "all": dict(
        logit_bias={3: 1.5},
        bad_words=[[5], [17, 3]],
        suppress_tokens=[96],
        allowed_token_ids=[*range(2, 97)],
        no_repeat_ngram_size=3,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        repetition_penalty=1.2,
        min_new_tokens=6,
        temperature=0.7,
        top_k=30,
        top_p=0.9,
        min_p=0.02,
        max_thinking_tokens=3,
        thinking_tags=TAGS,
        logits_processor=halved_after_three,
    ),
}


@cache
def plain(setting):
    return [
        oracle.generate(
            model_and_twin()[0],
            PROMPT,
            seed=11,
            sample=i,
            max_new_tokens=LENGTH,
            end_ids=(7, 30),
            **SETTINGS[setting],
        )
        for i in range(3)
    ]


def assert_plain(out, want):
    for sample, (tokens, logprobs, raw, _) in zip(out, want, strict=True):
        assert sample.tokens == tokens
        assert sample.logprobs == pytest.approx(logprobs, abs=1e-6)
        assert sample.raw_logprobs == pytest.approx(raw, abs=1e-6)


@few(10)
@pytest.mark.parametrize("kind", ["reference", "cpu", "static", "few-slots"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_equal_a_loops(setting, kind):
    budgets = {"cpu": (0, 6, 64), "few-slots": (16,)}.get(kind, (0, 24))
    for budget in budgets:
        out = engine_of(kind).generate(
            PROMPT,
            num_samples=3,
            seed=11,
            max_new_tokens=LENGTH,
            stop_token_ids=[7, 30],
            budget=budget,
            **SETTINGS[setting],
        )
        assert_plain(out, plain(setting))
        assert (out.stats.nodes_proposed > 0) == (budget > 0)


@pytest.mark.parametrize("setting", ["ngram-long", "thought-long"])
def test_what_is_looked_for_may_be_longer_than_the_text(setting):
    for budget in (0, 24):
        out = engine_of("cpu").generate(
            PROMPT,
            num_samples=3,
            seed=11,
            max_new_tokens=LENGTH,
            stop_token_ids=[7, 30],
            budget=budget,
            **SETTINGS[setting],
        )
        assert_plain(out, plain(setting))


def test_drafts_are_accepted_in_these_tests():
    """The equality above means something only where drafts are accepted and refused."""
    for setting in ("counts", "ngram", "thought", "all"):
        out = engine_of("cpu").generate(
            PROMPT, num_samples=5, seed=11, max_new_tokens=LENGTH, budget=64, **SETTINGS[setting]
        )
        assert 0 < out.stats.nodes_accepted < out.stats.nodes_proposed, setting


@pytest.mark.parametrize("verifier", ["recursive", "single"])
def test_other_verifiers_keep_to_constraints(verifier):
    out = engine_of("cpu").generate(
        PROMPT,
        num_samples=6,
        seed=1,
        max_new_tokens=18,
        budget=20,
        verifier=verifier,
        temperature=1.5,
        no_repeat_ngram_size=2,
        allowed_token_ids=[3, 5, 9, 17, 60, *range(70, 80)],
    )
    assert out.stats.nodes_accepted > 0
    for tokens in out.tokens:
        assert {*tokens} <= {3, 5, 9, 17, 60, *range(70, 80)}
        ids = PROMPT + tokens
        pairs = [*pairwise(ids)]
        # the prompt has one pair twice, which no sample adds to
        assert len(pairs) - len({*pairs}) == 1


@slow
def test_triton_draws_the_references_tokens(few_splits):
    model = build("llama", dtype=torch.float32)
    options = dict(SETTINGS["all"], num_samples=2, max_new_tokens=4, budget=6, seed=3)
    options |= dict(ignore_eos=True, min_new_tokens=2)
    del options["logits_processor"]
    runs = []
    for kernels in ("reference", "triton"):
        with csd.Engine(model, max_slots=3, kernels=kernels) as engine:
            runs.append(engine.generate(PROMPTS, **options))
    assert_same_samples(*runs)
    for a, b in zip(*runs, strict=True):
        for name in ("logprobs", "raw_logprobs"):
            for got, want in zip(getattr(a, name), getattr(b, name), strict=True):
                assert got == pytest.approx(want, abs=2e-4)


def test_prompts_of_a_call_have_the_rules_of_the_call():
    many = engine_of("few-slots").generate(
        PROMPTS,
        num_samples=3,
        seed=2,
        max_new_tokens=8,
        no_repeat_ngram_size=2,
        bad_words=[[6, 7]],
        temperature=0.5,
    )
    for prompt, out in zip(PROMPTS, many, strict=True):
        one = engine_of("cpu").generate(
            prompt,
            num_samples=3,
            seed=2,
            max_new_tokens=8,
            no_repeat_ngram_size=2,
            bad_words=[[6, 7]],
            temperature=0.5,
        )
        assert out.tokens == one.tokens
    # and the next call has none of them
    free = engine_of("few-slots").generate(PROMPTS[0], num_samples=3, seed=2, max_new_tokens=8)
    assert (
        free.tokens
        == csd.generate(
            engine_of("cpu"), PROMPTS[0], num_samples=3, seed=2, max_new_tokens=8
        ).tokens
    )


EMPTY = {
    "allowed_token_ids and suppress_tokens": dict(allowed_token_ids=[3], suppress_tokens=[3]),
    "allowed_token_ids and no_repeat_ngram_size": dict(
        allowed_token_ids=[40, 41], no_repeat_ngram_size=1
    ),
    "bad_words and allowed_token_ids": dict(bad_words=[[40], [41, 41]], allowed_token_ids=[40, 41]),
    "allowed_token_ids and min_new_tokens": dict(
        allowed_token_ids=[7], min_new_tokens=3, stop_token_ids=[7]
    ),
    "logits_processor": dict(logits_processor=lambda ids, x: torch.full_like(x, -math.inf)),
}


@pytest.mark.parametrize("kind", ["cpu", "static"])
@pytest.mark.parametrize("names", EMPTY)
def test_a_row_without_a_token_names_the_constraint(names, kind):
    options = dict(num_samples=2, max_new_tokens=6, budget=16, seed=0, **EMPTY[names])
    with pytest.raises(ValueError, match=f"^{names} banned all tokens after") as raised:
        engine_of(kind).generate(PROMPT, **options)
    assert "of prompt 0" in str(raised.value)
    out = engine_of(kind).generate(PROMPT, on_error="return", **options)
    assert out.error.startswith(names)
    # the engine goes on
    assert len(engine_of(kind).generate(PROMPT, max_new_tokens=2)) == 1


def test_a_draft_without_a_token_is_no_error():
    """A place that no sample comes to may have no token: two are allowed, and two are drawn."""
    out = engine_of("cpu").generate(
        [5, 40, 41, 40, 41],
        num_samples=4,
        max_new_tokens=1,
        budget=64,
        seed=0,
        allowed_token_ids=[40, 41, 42],
        no_repeat_ngram_size=3,
    )
    assert all({*tokens} <= {40, 41, 42} for tokens in out.tokens)
    out = engine_of("cpu").generate(
        PROMPT,
        num_samples=8,
        max_new_tokens=2,
        budget=64,
        seed=0,
        allowed_token_ids=[40, 41],
        no_repeat_ngram_size=1,
    )
    assert {tuple(sorted(tokens)) for tokens in out.tokens} == {(40, 41)}


def test_functions_get_prefixes_that_samples_can_have():
    seen = []

    def only_up(ids, logits):
        assert ids.dtype == torch.int64 and logits.shape == (len(ids), VOCAB)
        for row in ids.tolist():
            seen.append(tuple(row))
            assert row[len(PROMPT) :] == [*range(10, 10 + len(row) - len(PROMPT))]
        found = torch.full_like(logits, -math.inf)
        found[:, 10 + ids.shape[1] - len(PROMPT)] = 0
        return found

    out = engine_of("cpu").generate(
        PROMPT, num_samples=3, max_new_tokens=8, budget=64, seed=0, logits_processor=only_up
    )
    assert out.tokens == [[*range(10, 18)]] * 3
    assert max(map(len, seen)) < len(PROMPT) + 8 + 16
