"""Values of results, scores and audits at random: in float64 each is a plain loop's.

Both decoders, prompts of several chunks, and every option: log-probabilities of samples and of
prompts' tokens, likeliest tokens, entropies, gaps of audits, counts, errors, and the number of rows
of each.
"""

import re
from functools import cache
from itertools import pairwise

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.oracles import oracle
from helpers.oracles.grammar_oracle import END
from helpers.runs.fuzzing import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from test_configurations import (
    CONSTRAINTS,
    FILTERS,
    GRAMMAR,
    PIECES,
    PROMPTS,
    TAGS,
    TOKENS,
    loop,
)

import csd
from csd.engine.engine import Engine
from csd.engine.step.budget import StepTimeTable
from csd.evaluate.audit import audit
from csd.evaluate.score import TAKEN
from csd.traces.traces import Trace

CONTEXT = 48
EMPTY = re.compile(r"banned all tokens after (\d+) tokens of sample (\d+) of prompt (\d+)")
DECODERS = ("fused", "module")
RUN = st.fixed_dictionaries(
    dict(budget=st.sampled_from([0, 1, 5, 64]), speculate=st.booleans()),
    optional=dict(drafter=st.sampled_from(["prompt-lookup", "recycling"])),
)
MACHINE = st.fixed_dictionaries(
    dict(max_slots=st.sampled_from([1, 2, 8]), prefill_chunk=st.sampled_from([1, 3, 16, 512])),
    optional=dict(lag=st.integers(0, 3), static=st.just(True)),
)
ASKED = st.fixed_dictionaries(
    dict(
        num_samples=st.integers(1, 3),
        first_sample=st.integers(0, 3),
        max_new_tokens=st.integers(1, 9),
        seed=st.integers(0, 9),
        top_logprobs=st.integers(0, 5),
        entropy=st.booleans(),
        prompt_logprobs=st.booleans(),
    ),
    optional=dict(stop_token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)),
)


@cache
def models(family: str):
    """The model of the loop, and one for each decoder: the fused one rebinds its parameters."""
    made = []
    for _ in range(3):
        made.append(build(family, dtype=torch.float64, max_position_embeddings=CONTEXT))
        made[-1].generation_config.eos_token_id = None
    return made


def engine_of(family, decoder, machine):
    model = models(family)[1 + DECODERS.index(decoder)]
    engine = Engine(model, decoder=decoder, **machine)
    engine.step_times.table = StepTimeTable([1, 64], [1.0, 2.0])
    return engine


def options_of(filters, constraints, grammar, tags, longest):
    found = dict(filters) | (constraints or {}) | (grammar or {})
    if "min_new_tokens" in found:
        found["min_new_tokens"] = min(found["min_new_tokens"], longest)
    if "max_thinking_tokens" in found:
        assume(tags[0][-len(tags[1]) :] != tags[1])
        found["thinking_tags"] = tags
    return found


def near(got, want):
    assert len(got) == len(want)
    assert got == pytest.approx(want, abs=1e-6)


def check_measures(model, prompt, sample, asked):
    """Values at the positions of a sample's tokens, by the model itself."""
    rows = oracle.own(model, prompt + sample.tokens)[len(prompt) - 1 : -1]
    near(sample.raw_logprobs, [float(x[t]) for x, t in zip(rows, sample.tokens, strict=True)])
    if asked["entropy"]:
        near(sample.entropies, (-(rows.exp() * rows).sum(-1)).tolist())
    else:
        assert sample.entropies == []
    top = asked["top_logprobs"]
    assert len(sample.top_logprobs) == (len(rows) if top else 0)
    for listed, x in zip(sample.top_logprobs, rows, strict=False):
        values, ids = x.topk(top)
        assert [token for token, _ in listed] == ids.tolist()
        near([value for _, value in listed], values.tolist())


def check_prompt(model, prompt, logprobs, asked):
    if not asked["prompt_logprobs"]:
        assert logprobs is None
        return
    rows = oracle.own(model, prompt)
    assert logprobs[0] is None
    near(logprobs[1:], [float(rows[i, b]) for i, (_, b) in enumerate(pairwise(prompt))])


def check_counts(result):
    stats, samples = result.stats, list(result)
    assert stats.prompt_tokens == len(result.prompt_ids)
    assert stats.tokens == sum(len(s.tokens) for s in samples)
    drafted = [source for s in samples for source in s.sources if source]
    assert stats.nodes_accepted == len(drafted) == sum(stats.accepted.values())
    assert stats.thoughts_cut == sum(any(s.forced) for s in samples)
    for s in samples:
        lengths = {len(s.logprobs), len(s.raw_logprobs), len(s.sources), len(s.steps)}
        assert lengths == {len(s.tokens)}


def check_sample(model, prompt, sample, asked, options, place):
    """Tokens and values of one sample, or the place where it could not continue."""
    if sample.finish_reason == "error":
        found = EMPTY.search(sample.error)
        assert (len(sample.tokens), sample.index, place) == tuple(map(int, found.groups()))
        with pytest.raises(oracle.NoTokenLeft) as raised:
            loop(model, prompt, sample.index, asked["max_new_tokens"], asked, options)
        assert raised.value.args[0] == sample.tokens
        ends = ends_of(asked, options)
        logprobs, *_ = (
            oracle.given(
                model,
                prompt,
                sample.tokens,
                seed=asked["seed"],
                sample=sample.index,
                end_ids=ends,
                **options,
            )
            if sample.tokens
            else ([],)
        )
    else:
        assert sample.error is None
        tokens, logprobs, _, _ = loop(
            model, prompt, sample.index, asked["max_new_tokens"], asked, options
        )
        assert sample.tokens == tokens
        reached = len(tokens) == asked["max_new_tokens"]
        stopped = tokens[-1] in ends_of(asked, options)
        assert sample.finish_reason == ("stop" if stopped else "length") and (reached or stopped)
    near(sample.logprobs, logprobs)


def ends_of(asked, options):
    own = (END,) if any(name in options for name in oracle.GRAMMARS) else ()
    return (*own, *asked.get("stop_token_ids", ()))


@examples(few=4, many=10_000)
@given(
    st.sampled_from(["llama", "qwen3"]),
    st.sampled_from(DECODERS),
    PROMPTS,
    st.tuples(RUN, RUN),
    st.tuples(MACHINE, MACHINE),
    FILTERS,
    st.none() | CONSTRAINTS,
    GRAMMAR,
    TAGS,
    ASKED,
)
def test_values_of_samples_are_a_loops_whatever_drafts(
    family, decoder, prompts, runs, machines, filters, constraints, grammar, tags, asked
):
    model = models(family)[0]
    prompts = [ids for i, ids in enumerate(prompts) if ids not in prompts[:i]]
    options = options_of(filters, constraints, grammar, tags, asked["max_new_tokens"])
    tokenizer = PIECES if grammar else None
    found = []
    for run, machine, on_error in zip(runs, machines, ("return", "raise"), strict=True):
        with engine_of(family, decoder, machine) as engine:
            try:
                results, error = (
                    engine.generate(
                        prompts, on_error=on_error, tokenizer=tokenizer, **asked, **options, **run
                    ),
                    None,
                )
            except ValueError as raised:
                results, error = raised.samples, raised
            found.append((results, error))
    (results, none), (others, error) = found
    assert none is None
    for place, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        start = asked["first_sample"]
        assert [s.index for s in result] == [*range(start, start + asked["num_samples"])]
        check_prompt(model, prompt, result.prompt_logprobs, asked)
        check_counts(result)
        for sample in result:
            check_measures(model, prompt, sample, asked)
            check_sample(model, prompt, sample, asked, options, place)
    # drafts, slots and lag are invisible in errors too
    for a, b in zip(results, others, strict=True):
        assert (a.tokens, a.finish_reasons, a.error) == (b.tokens, b.finish_reasons, b.error)
        assert [s.error for s in a] == [s.error for s in b]
    first = next((r.error for r in results if r.error is not None), None)
    assert first == (None if error is None else str(error))


@examples(few=4, many=10_000)
@given(
    st.sampled_from(["llama", "qwen3"]),
    st.sampled_from(DECODERS),
    PROMPTS,
    MACHINE,
    FILTERS,
    st.none() | CONSTRAINTS,
    GRAMMAR,
    TAGS,
    ASKED,
    st.data(),
)
def test_values_of_given_tokens_are_a_loops(
    family, decoder, prompts, machine, filters, constraints, grammar, tags, asked, data
):
    """Scores of any tokens, and gaps of samples in which some tokens were exchanged."""
    model, prompt = models(family)[0], prompts[0]
    options = options_of(filters, constraints, grammar, tags, asked["max_new_tokens"])
    count = asked["num_samples"]
    with engine_of(family, decoder, machine) as engine:
        taken = {name: value for name, value in options.items() if name in TAKEN}
        given_ids = st.lists(TOKENS, min_size=1, max_size=CONTEXT - len(prompt))
        rows = data.draw(st.lists(given_ids, min_size=count, max_size=count))
        measures = {n: asked[n] for n in ("top_logprobs", "entropy", "prompt_logprobs")}
        out = csd.score(engine, prompt, rows, **taken, **measures)
        assert out.tokens == rows
        check_prompt(model, prompt, out.prompt_logprobs, asked)
        for sample in out:
            check_measures(model, prompt, sample, asked)
            logprobs, *_ = oracle.given(
                model, prompt, sample.tokens, seed=0, sample=sample.index, **taken
            )
            near(sample.logprobs, logprobs)
        drawn = engine.generate(
            prompt,
            on_error="return",
            tokenizer=PIECES if grammar else None,
            budget=0,
            **asked,
            **options,
        )
        samples = [s for s in drawn if s.tokens]
        ends = ends_of(asked, options)
        tokens = [list(s.tokens) for s in samples]
        for row in tokens:
            for place in data.draw(st.sets(st.integers(0, len(row) - 1), max_size=2)):
                row[place] = data.draw(TOKENS)
        if grammar:
            engine.model.loaded.tokenizer = PIECES
        trace = Trace(
            problem=0,
            prompt=prompt,
            samples=tokens,
            temperature=options["temperature"],
            top=[],
            seed=asked["seed"],
            indices=[s.index for s in samples],
            stop_ids=ends,
        )
        sampling = {name: value for name, value in options.items() if name != "temperature"}
        (audited,) = audit(engine, [trace], **sampling)
        engine.model.loaded.tokenizer = None
    assert [a.tokens for a in audited] == tokens
    for a in audited:
        sampling = dict(options)
        if "min_new_tokens" in sampling:
            longest = max(map(len, tokens))
            sampling["min_new_tokens"] = min(sampling["min_new_tokens"], longest)
        *_, gaps = oracle.given(
            model, prompt, a.tokens, seed=asked["seed"], sample=a.index, end_ids=ends, **sampling
        )
        near(a.gaps, gaps)
