"""Samples of grammars: always valid, the same with drafts, and plain sampling under the masks."""

import json
import math
import re

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.oracles import oracle
from helpers.oracles.grammar_oracle import PIECES, Pieces

import csd
from csd.models.demo import toy

pytest.importorskip("llguidance")
from csd.engine.options import grammar as grammar_options
from csd.engine.options.grammar import matcher_of, reader_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "abc", "xyz"]},
        "kind": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def made():
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer) as e:
        yield e, tokenizer


@pytest.mark.parametrize("budget", [0, 6, 64, "auto"])
def test_every_text_is_of_the_schema(made, budget):
    e, _ = made
    out = e.generate(
        "a b",
        num_samples=8,
        max_new_tokens=200,
        seed=0,
        json_schema=SCHEMA,
        temperature=1.3,
        budget=budget,
        min_new_tokens=0,
    )
    want = e.generate(
        "a b",
        num_samples=8,
        max_new_tokens=200,
        seed=0,
        json_schema=SCHEMA,
        temperature=1.3,
        speculate=False,
    )
    assert out.tokens == want.tokens
    assert out.finish_reasons == ["stop"] * 8
    for text in out.texts:
        value = json.loads(text)
        assert value["name"] in ("ab", "abc", "xyz") and type(value["kind"]) is bool
        assert value.keys() <= {"name", "kind", "size"}
    assert len(set(out.texts)) > 2
    if budget in (6, 64):
        assert out.stats.nodes_accepted > 0


@pytest.mark.parametrize("static", [False, True])
def test_regular_expressions_and_lark(made, static):
    model, tokenizer = toy()
    with csd.Engine(model, tokenizer=tokenizer, static=static) as e:
        options = dict(num_samples=6, max_new_tokens=60, seed=1, budget=30)
        for text in e.generate("x", regex="(ab|cd){2,5}!?", **options).texts:
            assert re.fullmatch("(ab|cd){2,5}!?", text)
        lark = 'start: "(" start ")" | /[0-9]/'
        for text in e.generate("x", grammar=lark, **options).texts:
            assert re.fullmatch(r"\(*[0-9]\)*", text) and text.count("(") == text.count(")")


class Sized(Letters):
    eos_token_id = 29

    def __len__(self):
        return len(self.alphabet)


class Allowed:
    """A function of rows: what a fresh matcher allows behind a sample's tokens."""

    def __init__(self, tokenizer, grammar, prompt_len, vocab, ends):
        from llguidance import LLMatcher

        self.matcher = lambda: LLMatcher(
            reader_of(tokenizer, vocab), LLMatcher.grammar_from_regex(grammar)
        )
        self.prompt_len, self.vocab, self.ends = prompt_len, vocab, ends

    def __call__(self, ids, logits):
        matcher = self.matcher()
        assert matcher.consume_tokens(ids[0, self.prompt_len :].tolist())
        found = torch.full_like(logits, -math.inf)
        for t in range(self.vocab):
            own = t not in self.ends and matcher.validate_tokens([t]) == 1
            if own or (t in self.ends and matcher.is_accepting()):
                found[0, t] = logits[0, t]
        return found


def test_tokens_are_plain_samplings_under_the_masks():
    """In float64, of a checkpoint with a tokenizer of letters."""
    model, twin = (build("llama", dtype=torch.float64) for _ in range(2))
    twin.generation_config.eos_token_id = None
    letters = Sized()
    pattern = "(abc|abd|b.)+"
    ends, prompt = (29,), [5, 17, 3]
    allowed = Allowed(letters, pattern, len(prompt), VOCAB, ends)
    for rules in ({}, dict(no_repeat_ngram_size=4, presence_penalty=0.3, top_p=0.95)):
        options = dict(max_new_tokens=14, temperature=0.9, **rules)
        with csd.Engine(twin) as e:
            out = e.generate(
                prompt,
                num_samples=4,
                seed=3,
                budget=20,
                regex=pattern,
                tokenizer=letters,
                **options,
            )
        for sample in out:
            tokens, logprobs, raw, _ = oracle.generate(
                model,
                prompt,
                seed=3,
                sample=sample.index,
                end_ids=ends,
                logits_processor=[allowed],
                **options,
            )
            assert sample.tokens == tokens
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-6)
            assert sample.raw_logprobs == pytest.approx(raw, abs=1e-6)


@pytest.mark.parametrize("budget", [0, 16])
def test_the_tokenizers_end_is_no_token_where_others_end_a_sample(made, budget):
    e, tokenizer = made
    (z,) = tokenizer("z", add_special_tokens=False)["input_ids"]
    # endless, so that a whole text may go on
    out = e.generate(
        "a b",
        num_samples=8,
        max_new_tokens=40,
        seed=0,
        regex="[ab]+",
        end_token_ids=[z],
        budget=budget,
        temperature=2.0,
    )
    assert tokenizer.eos_token_id not in {token for tokens in out.tokens for token in tokens}
    assert "stop" in out.finish_reasons
    for tokens, reason in zip(out.tokens, out.finish_reasons, strict=True):
        assert (tokens[-1] == z) == (reason == "stop") and len(tokens) > 1


def test_a_function_allows_nothing_that_the_grammar_does_not(made):
    e, _ = made
    out = e.generate(
        "x",
        num_samples=4,
        max_new_tokens=9,
        seed=0,
        regex="[ab]{8}",
        logits_processor=lambda ids, x: torch.zeros_like(x),
    )
    assert all(re.fullmatch("[ab]{8}", text) for text in out.texts)


class NoSpelling(Pieces):
    """Raises where a matcher asks for the tokens of what must follow an f."""

    def __call__(self, text, add_special_tokens=True):
        if "alse" in str(text):
            raise ValueError("a tokenizer's own error")
        return super().__call__(text)


def test_a_draft_that_its_matcher_cannot_read_changes_nothing():
    twin = build("llama", dtype=torch.float64)
    twin.generation_config.eos_token_id = None
    f = PIECES.index("f")
    options = dict(
        num_samples=4,
        max_new_tokens=6,
        seed=0,
        regex="(true|false|null)!",
        tokenizer=NoSpelling(),
        logit_bias={f: -30.0},
    )
    with csd.Engine(twin) as e:
        want = csd.generate(e, [3, f], budget=0, **options)
        # the prompt drafts the f
        got = csd.generate(e, [3, f], budget=64, **options)
    assert got.tokens == want.tokens and want.finish_reasons == ["stop"] * 4


@pytest.mark.parametrize("budget", [0, 20])
@pytest.mark.parametrize("opened", [False, True])
def test_a_grammar_governs_what_follows_the_thought(made, budget, opened):
    """The toy thinks about nothing in particular, for as long as it may; it never ends alone."""
    e, tokenizer = made
    options = dict(
        num_samples=8,
        max_new_tokens=60,
        seed=2,
        regex="(ab|cd){2,5}!",
        max_thinking_tokens=6,
        thinking_tags=("<", ">"),
        suppress_tokens=tokenizer.encode(">"),
        temperature=1.2,
    )
    # what begins the text or a thought is all that comes first
    out = e.generate("x<" if opened else "x", budget=budget, **options)
    thoughts = 0
    for sample in out:
        thought, has, text = sample.text.rpartition(">")
        assert re.fullmatch("(ab|cd){2,5}!", text) and sample.finish_reason == "stop"
        assert opened or not has or thought[0] == "<"
        if has:
            assert sample.forced.index(True) == 6 + (not opened)
        assert sum(sample.forced) == bool(has)
        thoughts += bool(has)
    assert thoughts == 8 if opened else 0 < thoughts < 8
    assert out.tokens == e.generate(out.prompt_ids, speculate=False, **options).tokens


def test_a_vote_over_json(made):
    e, _ = made
    out = e.generate("a", num_samples=6, max_new_tokens=80, seed=0, json_schema=SCHEMA)
    decided = csd.vote(out, extract=lambda text: json.loads(text)["name"])
    assert decided.answer in ("ab", "abc", "xyz") and None not in decided.answers
    best = csd.best_of(out, lambda sample: -len(sample.text))
    assert json.loads(best.sample.text)


REFUSED = {
    "schema": (
        dict(json_schema={"properties": {"a": {"items": {"anyOf": [{}, {"type": "nothing"}]}}}}),
        ValueError,
        "json_schema must be accepted .* at /properties/a/items/anyOf/1: .*nothing",
    ),
    "schema-pointer": (
        dict(json_schema={"properties": {"a/b~c": {"type": "nothing"}}}),
        ValueError,
        "at /properties/a~1b~0c: ",
    ),
    "schema-top": (dict(json_schema={"type": "nothing"}), ValueError, "at its top: .*nothing"),
    "text": (dict(json_schema="{"), ValueError, "json_schema must be JSON, got '{'"),
    "kind": (dict(json_schema=3), TypeError, "json_schema must be a dict, a JSON string or a"),
    "regex": (dict(regex="(a"), ValueError, "(?s)regex must be accepted by llguidance.*unclosed"),
    "lark": (dict(grammar="start: nothing"), ValueError, "grammar must be .*unknown name"),
    "two": (dict(regex="a", grammar="start: /a/"), ValueError, "only one of regex and grammar"),
}


@pytest.mark.parametrize(("options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(made, options, error, message):
    with pytest.raises(error, match=message):
        made[0].generate("a", max_new_tokens=3, **options)


def test_a_schema_that_speaks_of_options_has_none():
    from csd.engine.options.grammar import _of_schema

    plain, options = {"type": "array"}, {"x-guidance": {"whitespace_flexible": False}}
    bound = json.loads(_of_schema(json.dumps(plain | {"description": "no x-guidance"})))
    assert "0,40" in json.dumps(bound)
    assert "0,40" not in _of_schema(json.dumps(plain | options))


def test_it_needs_a_tokenizer():
    with pytest.raises(ValueError, match="regex needs a tokenizer"):
        csd.generate(engine(PrefixSum()), [1], regex="a")


def test_a_place_without_a_token_names_the_grammar(made):
    with pytest.raises(ValueError, match=r"^min_new_tokens and regex banned all tokens"):
        made[0].generate("a", max_new_tokens=9, min_new_tokens=5, regex="ab", seed=0)


# after its property it allows a comma, but no key: the pattern has no other
DEAD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "patternProperties": {"^a$": {"type": "integer"}},
    "additionalProperties": False,
}
DEAD_ENDS = {
    "schema": dict(json_schema=DEAD, max_new_tokens=80),
    "within": dict(
        json_schema={
            "type": "object",
            "properties": {"b": {"type": "boolean"}, "c": DEAD},
            "required": ["b", "c"],
            "additionalProperties": False,
        },
        max_new_tokens=120,
    ),
    "min": dict(regex="a{1,3}", min_new_tokens=5, max_new_tokens=6),
    "words": dict(
        regex="abe", bad_words=[[PIECES.index(p)] for p in ("b", "ab")], max_new_tokens=12
    ),
    "repeats": dict(regex="[ab]{9,}c", no_repeat_ngram_size=1, max_new_tokens=30),
    "suppressed": dict(
        grammar='start: "a" /[bc]/',
        suppress_tokens=[PIECES.index(p) for p in ("b", "c", "ab", "abc", "bc")],
        max_new_tokens=4,
    ),
    "function": dict(
        regex="[a-d]+",
        max_new_tokens=9,
        logits_processor=lambda ids, x: x.masked_fill(ids[:, -1:] == PIECES.index("c"), -math.inf),
    ),
}


@pytest.mark.parametrize("asked", DEAD_ENDS.values(), ids=DEAD_ENDS)
def test_a_dead_end_ends_its_sample_alone_whatever_is_drafted(asked):
    model = build("llama", dtype=torch.float64)
    model.generation_config.eos_token_id = None
    options = dict(num_samples=3, seed=1, tokenizer=Pieces(), on_error="return") | asked
    with csd.Engine(model) as e:
        plain = e.generate([5, 17, 3], budget=0, **options)
        assert "error" in plain.finish_reasons
        for sample in plain:
            at = f" banned all tokens after {len(sample.tokens)} tokens of sample {sample.index} "
            assert sample.error is None or at in sample.error
            # each sample as if it were alone
            own = options | dict(num_samples=1, first_sample=sample.index)
            (alone,) = e.generate([5, 17, 3], **own)
            assert (alone.tokens, alone.error) == (sample.tokens, sample.error)
        for budget, lag in ((1, 0), (64, 0), (64, 3)):
            e.lag = lag
            out = e.generate([5, 17, 3], budget=budget, **options)
            assert out.tokens == plain.tokens and out.finish_reasons == plain.finish_reasons
            assert [s.error for s in out] == [s.error for s in plain]
            assert out.texts == plain.texts
        with pytest.raises(ValueError) as raised:
            e.generate([5, 17, 3], budget=64, **options | dict(on_error="raise"))
        assert str(raised.value) == plain.error
        assert raised.value.samples.tokens == plain.tokens


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("schema", "/patternProperties/^a$"),
        ("within", "/properties/c/patternProperties/^a$"),
    ],
)
def test_a_dead_end_of_a_schema_names_its_part_and_the_remedy_works(name, part):
    model = build("llama", dtype=torch.float64)
    model.generation_config.eos_token_id = None
    asked = DEAD_ENDS[name] | dict(num_samples=5, seed=1, tokenizer=Pieces())
    with csd.Engine(model) as e:
        with pytest.raises(ValueError) as raised:
            e.generate([5, 17, 3], **asked)
        assert str(raised.value).startswith(f"json_schema at {part} banned all tokens after ")
        assert f"; remove {part} or change it" in str(raised.value)
        schema = json.loads(json.dumps(asked["json_schema"]))
        *above, last = part.split("/")[1:]
        inside = schema
        for key in above:
            inside = inside[key]
        del inside[last]
        out = e.generate([5, 17, 3], **asked | dict(json_schema=schema), on_error="return")
        assert out.error is None, out.error


def test_the_search_for_a_dead_end_is_short(monkeypatch):
    """Samples in flight wait for it, so a long schema is not named in parts."""
    model = build("llama", dtype=torch.float64)
    model.generation_config.eos_token_id = None
    compiled = []

    def watched(params, *rest):
        compiled.append(len(params.json_schema))
        return matcher_of(params, *rest)

    monkeypatch.setattr(grammar_options, "matcher_of", watched)
    asked = DEAD_ENDS["schema"] | dict(num_samples=5, seed=1, tokenizer=Pieces())
    with csd.Engine(model) as e:
        for more in (0, 20, 400):
            schema = DEAD | {"$defs": {f"n{i}": {"type": "integer"} for i in range(more)}}
            with pytest.raises(ValueError, match=r"^json_schema .*banned all tokens after"):
                e.generate([5, 17, 3], **asked | dict(json_schema=schema))
            searched = bool(compiled)
            assert searched == (more < 400) and sum(compiled) <= 5 * grammar_options.SEARCHED
            compiled.clear()


def test_requests_with_dead_ends_leave_others_alone():
    """A handle raises the first error, with all samples, or returns them on request."""
    model = build("llama", dtype=torch.float64)
    model.generation_config.eos_token_id = None
    asked = dict(DEAD_ENDS["schema"], num_samples=5, seed=1)
    with csd.AsyncEngine(model, tokenizer=Pieces(), max_slots=4) as service:
        alone = service.submit([5, 17, 3], on_error="return", **asked).result(60)
        assert {"error", "stop"} <= {*alone.finish_reasons}
        handles = [
            service.submit([5, 17, 3], owner="a", on_error=how, **asked)
            for how in ("return", "raise")
        ]
        other = service.submit([5, 17, 3], num_samples=2, seed=1, max_new_tokens=9)
        assert handles[0].result(60).tokens == alone.tokens
        pieces = [piece for piece in _until_error(handles[1])]
        with pytest.raises(ValueError) as raised:
            handles[1].result(60)
        assert str(raised.value) == alone.error
        assert raised.value.samples.tokens == alone.tokens
        ends = {p.index: p.sample.error for p in pieces if p.sample is not None}
        assert ends == {s.index: s.error for s in alone}
        assert other.result(60).finish_reasons == ["length"] * 2


def _until_error(handle):
    with pytest.raises(ValueError):
        yield from handle


LONG = {
    "type": "object",
    "properties": {
        "identifier": {"enum": ["ab", "abc", "xyz"]},
        "an_unusually_long_name_of_a_flag": {"type": "boolean"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["identifier", "an_unusually_long_name_of_a_flag", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def spans(tokens, matcher):
    """For each token of a sample: how many tokens from it on are those that the grammar forces."""
    found = []
    for i, token in enumerate(tokens):
        forced, n = matcher.compute_ff_tokens(), 0
        while n < len(forced) and tokens[i + n : i + n + 1] == [forced[n]]:
            n += 1
        found.append(n)
        matcher.consume_token(token)
    return found


@pytest.mark.parametrize("schema", [SCHEMA, LONG])
@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize("drafter", ["consensus", "prompt-lookup"])
def test_forced_spans_take_no_steps_of_their_own(made, schema, samples, drafter):
    """A step commits a drawn token and up to 16 forced ones behind it, whatever else is drafted.

    The budget has rows for the forced tokens of all samples, but not for these and other drafts.
    """
    e, tokenizer = made
    options = dict(max_new_tokens=200, temperature=1.3, json_schema=schema, min_new_tokens=0)
    out = e.generate(
        "a b", num_samples=samples, seed=0, budget=16 * samples, drafter=drafter, **options
    )
    request = e.prepare("a b", **options).requests[0]
    fresh = matcher_of(request.params, tokenizer, e.config.vocab)
    for sample in out:
        # the end token is drawn, not forced
        span = spans(sample.tokens[:-1], fresh.deep_copy())
        at = most = 0
        while at < len(sample.tokens):
            most += 1
            at += min(span[at], 16) + 1 if at < len(span) else 1
        assert len(set(sample.steps)) <= most
        free = 1 + sum(n == 0 for n in span)
        assert most <= free + 3 and len(sample.tokens) > 1.5 * most
