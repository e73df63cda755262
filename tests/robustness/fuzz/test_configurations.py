"""Whole configurations at random: in float64 every token is plain sampling's."""

import re
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.oracles import oracle
from helpers.oracles.grammar_oracle import END, GRAMMARS, Pieces
from helpers.runs.fuzzing import examples
from helpers.targets import slow
from hypothesis import assume, event, given
from hypothesis import strategies as st

import csd
from csd.engine.engine import Engine
from csd.engine.step.budget import StepTimeTable

# some prompts and their new tokens do not fit
CONTEXT = 34
EMPTY = re.compile(r"banned all tokens after (\d+) tokens of sample (\d+)")
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
# few different ones, so that n-grams come again
TOKENS = st.one_of(st.integers(3, 8), st.integers(0, VOCAB - 1))


@cache
def pair(family: str):
    """The model of the loop, and the same one for csd, which rebinds its parameters."""
    model, twin = (
        build(family, dtype=torch.float64, max_position_embeddings=CONTEXT) for _ in range(2)
    )
    for m in (model, twin):
        m.generation_config.eos_token_id = None
    return model, twin


def shifted(ids, logits):
    """Depends on the whole prefix."""
    return logits + (ids.sum(-1, keepdim=True) % 7) * torch.arange(VOCAB) % 5 / 4


def odd_after_even(ids, logits):
    return logits.masked_fill((ids[:, -1:] % 2 == 0) & (torch.arange(VOCAB) % 2 == 0), -torch.inf)


ENGINE = st.fixed_dictionaries(
    dict(max_slots=st.sampled_from([1, 2, 3, 8])),
    optional=dict(
        prefill_chunk=st.sampled_from([1, 3, 16, 512]),
        lag=st.integers(0, 4),
        together=st.integers(1, 4),
        static=st.booleans(),
    ),
)
FILTERS = st.fixed_dictionaries(
    dict(temperature=st.one_of(st.just(0), st.floats(0.2, 2))),
    optional=dict(
        top_k=st.integers(1, VOCAB + 5),
        top_p=st.floats(0.05, 1),
        min_p=st.floats(0, 0.5),
        typical_p=st.one_of(st.just(1.0), st.floats(0.05, 1)),
        repetition_penalty=st.floats(0.6, 1.8),
        min_new_tokens=st.integers(0, 6),
    ),
)
SOME = st.lists(TOKENS, min_size=1, max_size=4)
CONSTRAINTS = st.fixed_dictionaries(
    {},
    optional=dict(
        logit_bias=st.dictionaries(TOKENS, st.floats(-8, 8) | st.just(float("-inf")), max_size=4),
        bad_words=st.lists(SOME, min_size=1, max_size=4),
        allowed_token_ids=st.lists(TOKENS, min_size=5, max_size=40),
        suppress_tokens=SOME,
        no_repeat_ngram_size=st.integers(1, 4),
        frequency_penalty=st.floats(-1, 2),
        presence_penalty=st.floats(-1, 2),
        logits_processor=st.sampled_from([shifted, [shifted, odd_after_even]]),
        max_thinking_tokens=st.integers(0, 5),
    ),
)
# with and without llguidance all other options are tried
GRAMMAR = st.none() | st.sampled_from(GRAMMARS) if find_spec("llguidance") else st.none()
PIECES = Pieces()
TAGS = st.tuples(SOME, SOME, st.lists(TOKENS, max_size=3)).map(
    lambda tags: (tags[0], tags[1], tags[2] + tags[1])
)
CALL = st.fixed_dictionaries(
    dict(
        num_samples=st.integers(1, 3),
        max_new_tokens=st.integers(1, 8),
        seed=st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**64 - 1)),
        budget=st.one_of(st.sampled_from([0, 64, "auto"]), st.integers(1, 20)),
    ),
    optional=dict(
        first_sample=st.integers(0, 5),
        speculate=st.booleans(),
        drafter=st.sampled_from(["consensus", "prompt-lookup", "paper", "paper-tree", "recycling"]),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    ),
)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=30), min_size=1, max_size=2)


def ends_of(call, filters):
    own = (END,) if any(name in filters for name in oracle.GRAMMARS) else ()
    return (*own, *call.get("stop_token_ids", ()))


def loop(model, prompt, sample, longest, call, filters):
    return oracle.generate(
        model,
        prompt,
        seed=call["seed"],
        sample=sample,
        max_new_tokens=longest,
        end_ids=ends_of(call, filters),
        **filters,
    )


@slow
@examples(few=100, many=10_000)
@given(
    st.sampled_from(FAMILIES),
    PROMPTS,
    ENGINE,
    FILTERS,
    st.none() | CONSTRAINTS,
    GRAMMAR,
    TAGS,
    CALL,
    st.none() | st.integers(1, 3),
)
def test_every_token_is_plain_samplings(
    family, prompts, machine, filters, constraints, grammar, tags, call, enough
):
    model, twin = pair(family)
    until = None if enough is None else lambda prefix: len(prefix) >= enough
    filters = dict(filters)
    if "min_new_tokens" in filters:
        filters["min_new_tokens"] = min(filters["min_new_tokens"], call["max_new_tokens"])
    filters |= (constraints or {}) | (grammar or {})
    if "max_thinking_tokens" in filters:
        # no thought would begin
        assume(tags[0][-len(tags[1]) :] != tags[1])
        filters["thinking_tags"] = tags
    # pytest --hypothesis-show-statistics counts them
    for name in filters:
        event(name)
    if grammar and "max_thinking_tokens" in filters:
        event("a grammar behind a thought")
    engine = Engine(twin, **machine)
    # measured, it would take longer than all else here
    engine.step_times.table = StepTimeTable([1, 64], [1.0, 2.0])
    results = csd.generate(
        engine,
        prompts,
        until=until,
        on_error="return",
        tokenizer=PIECES if grammar else None,
        **filters,
        **call,
    )
    engine.release()
    seen: dict[tuple, int] = {}
    for prompt, result in zip(prompts, results, strict=True):
        if len(prompt) + call["max_new_tokens"] > CONTEXT:
            assert not len(result) and "exceed the model's context" in result.error
            continue
        start = seen.get(tuple(prompt), call.get("first_sample", 0))
        seen[tuple(prompt)] = start + call["num_samples"]
        if result.error is not None:
            found = EMPTY.search(result.error)
            with pytest.raises(oracle.NoTokenLeft) as raised:
                loop(model, prompt, int(found[2]), call["max_new_tokens"], call, filters)
            assert len(raised.value.args[0]) == int(found[1])
            continue
        assert [s.index for s in result] == [*range(start, start + call["num_samples"])]
        for place, sample in enumerate(result):
            cancelled = until is not None and place >= enough
            assert (sample.finish_reason == "cancelled") == cancelled
            if cancelled and not sample.tokens:
                continue
            longest = len(sample.tokens) if cancelled else call["max_new_tokens"]
            tokens, logprobs, raw, _ = loop(model, prompt, sample.index, longest, call, filters)
            assert sample.tokens == tokens
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-6)
            assert sample.raw_logprobs == pytest.approx(raw, abs=1e-6)
