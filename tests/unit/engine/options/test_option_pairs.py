"""Two options about the same tokens mean in every entry what each of them means in a plain loop."""

import math
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from helpers.models import checkpoints, scripted
from helpers.oracles import oracle
from helpers.runs.served import NAME, call, served
from helpers.targets import few

import csd
from csd.serve import AsyncEngine
from csd.serve.http.names import SAMPLING

PROMPT, SEED, LONGEST, SAMPLES = [3, 1, 4, 1, 5], 7, 14, 2
MODEL = scripted.PrefixSum()


def loop(options, ends=(), sample=0):
    """Tokens of a sample of `MODEL`, as transformers' processors have them."""
    key, tokens = oracle.key_of(SEED, PROMPT), []
    process = oracle.processors(len(PROMPT), scripted.VOCAB, options, ends)
    for position in range(options.get("max_new_tokens", LONGEST)):
        logits = MODEL.next_logits(PROMPT + tokens)[None]
        z = process(torch.tensor([PROMPT + tokens]), logits.clone())[0].double()
        if not (z > -math.inf).any():
            raise oracle.NoTokenLeft(tokens)
        tokens.append(oracle.choose(z.numpy(), key, position, sample, 0)[0])
        text = "".join(Letters.alphabet[t] for t in tokens)
        if tokens[-1] in ends or any(stop in text for stop in options.get("stop", ())):
            return tokens, "stop"
    return tokens, "length"


class Letters(scripted.Letters):
    pass


# tokens of the sample without options: each setting below changes it
FREE = loop({})[0]
A, C, D, B, CONFIG_END = [*dict.fromkeys(FREE[2:])][:5]
Letters.eos_token_id = D
SETTINGS = {
    "ignore_eos": dict(ignore_eos=True),
    "stop ids": dict(stop_token_ids=[A]),
    "stop ids of an end": dict(stop_token_ids=[D, CONFIG_END]),
    "end ids": dict(end_token_ids=[B]),
    "no end ids": dict(end_token_ids=[]),
    "at least": dict(min_new_tokens=6),
    "at most": dict(max_new_tokens=8),
    "stop": dict(stop=[Letters.alphabet[C]]),
    "suppressed": dict(suppress_tokens=[A, D]),
    "bad words": dict(bad_words=[[B], [CONFIG_END], [A, C]]),
    "bias": dict(logit_bias={A: 3.0, B: -100.0, CONFIG_END: 2.5}),
    "allowed": dict(allowed_token_ids=sorted({A, B, C, CONFIG_END, *range(0, 32, 2)})),
    "not repeated": dict(no_repeat_ngram_size=1),
}
PAIRS = [
    (a, b) for a, b in combinations(SETTINGS, 2) if not SETTINGS[a].keys() & SETTINGS[b].keys()
]


def expected(options, config):
    """Tokens and finish reasons: an argument replaces the config's value of the same option."""
    known = {
        "suppress_tokens": "suppress_tokens",
        "bad_words": "bad_words_ids",
        "stop": "stop_strings",
    }
    for name, other in known.items():
        if name not in options and getattr(config, other, None):
            options = options | {name: getattr(config, other)}
    ends = options.get("end_token_ids")
    if ends is None:
        ends = [*config.eos_token_id, D]
    if options.get("ignore_eos"):
        ends = []
    ends = [*ends, *options.get("stop_token_ids", ())]
    own = {n: x for n, x in options.items() if not n.endswith("token_ids") or n.startswith("all")}
    return [loop(own, ends, i) for i in range(SAMPLES)]


def config_of(**more):
    return SimpleNamespace(eos_token_id=[CONFIG_END], **more)


@pytest.fixture(scope="module")
def engine():
    return scripted.engine(MODEL, Letters(), config_of())


@pytest.fixture(scope="module")
def port():
    with served(AsyncEngine(scripted.engine(MODEL, Letters(), config_of()))) as (port, _):
        yield port


@pytest.fixture(scope="module")
def service():
    with AsyncEngine(scripted.engine(MODEL, Letters(), config_of())) as made:
        yield made


ASKED = dict(num_samples=SAMPLES, seed=SEED)


def as_pairs(out):
    return [*zip(out.tokens, out.finish_reasons, strict=True)]


def over_http(port, options):
    names = {option: name for name, option in reversed(SAMPLING.items())}
    body = {names[name]: value for name, value in options.items()}
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
    body |= dict(model=NAME, prompt=PROMPT, n=SAMPLES, seed=SEED, return_token_ids=True)
    status, answer = call(port, "/v1/completions", {"max_tokens": LONGEST} | body)
    assert status == 200, answer
    return [(c["token_ids"], c["finish_reason"]) for c in answer["choices"]]


@few(6)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(pair))
def test_pairs_mean_what_each_of_them_means(pair, engine, service, port):
    options = SETTINGS[pair[0]] | SETTINGS[pair[1]]
    want = expected(options, engine.generation_config)
    longest = {"max_new_tokens": LONGEST}
    for more in (dict(budget=6), dict(speculate=False)):
        out = csd.generate(engine, PROMPT, **longest | ASKED | options | more)
        assert as_pairs(out) == want
        for sample in out:
            # the text ends before whatever ended the sample
            text = "".join(Letters.alphabet[t] for t in sample.tokens)
            ended = sample.finish_reason == "stop"
            assert sample.text == (text[:-1] if ended else text)
    assert as_pairs(service.submit(PROMPT, **longest | ASKED | options).result(60)) == want
    if "end_token_ids" not in options:
        assert over_http(port, options) == want


def test_each_setting_changes_the_samples():
    plain = expected({}, config_of())
    for name, setting in SETTINGS.items():
        assert expected(setting, config_of()) != plain or name == "stop ids of an end", name


OF_CONFIG = {
    "suppress_tokens": dict(suppress_tokens=[A, C]),
    "bad_words_ids": dict(bad_words_ids=[[B], [A]]),
    "stop_strings": dict(stop_strings=[Letters.alphabet[A]]),
}


@pytest.mark.parametrize("given", ["none", *SETTINGS])
@pytest.mark.parametrize("name", OF_CONFIG)
def test_an_argument_replaces_what_the_config_has(name, given):
    config, options = config_of(**OF_CONFIG[name]), SETTINGS.get(given, {})
    engine = scripted.engine(MODEL, Letters(), config)
    out = csd.generate(engine, PROMPT, **{"max_new_tokens": LONGEST} | ASKED | options)
    assert as_pairs(out) == expected(options, config)


def test_lengths_that_exclude_each_other_are_an_error(engine, port):
    asked = dict(min_new_tokens=9, max_new_tokens=8)
    with pytest.raises(ValueError, match="min_new_tokens must be at most max_new_tokens=8, got 9"):
        csd.generate(engine, PROMPT, **asked)
    body = dict(model=NAME, prompt=PROMPT, min_tokens=9, max_tokens=8)
    status, answer = call(port, "/v1/completions", body)
    assert status == 400 and "min_tokens must be at most max_tokens=8" in answer["error"]["message"]


@pytest.fixture(scope="module")
def model():
    yield checkpoints.build("llama", dtype=torch.float64)
    csd.release()


# arguments of `csd.score` and `csd.logprobs`
SCORED = ("suppressed", "bad words", "bias", "allowed", "not repeated")
SCORED_PAIRS = [*combinations(SCORED, 2)]


@few(3)
@pytest.mark.parametrize("pair", SCORED_PAIRS, ids=lambda pair: "-".join(pair))
def test_pairs_of_changes_score_as_a_plain_loop(pair, model):
    options = SETTINGS[pair[0]] | SETTINGS[pair[1]]
    wanted = oracle.given(model, PROMPT, FREE[:9], seed=0, sample=0, **options)
    scored = csd.score(model, PROMPT, [FREE[:9]], **options)[0]
    found = csd.logprobs(model, PROMPT, [FREE[:9]], **options)
    assert scored.logprobs == pytest.approx(wanted[0])
    assert found.logprobs[0].tolist() == pytest.approx(wanted[0])
    assert scored.raw_logprobs == pytest.approx(wanted[1])


@few(2)
@pytest.mark.parametrize("name", SCORED)
def test_end_tokens_are_banned_before_the_least_tokens_in_logprobs(name, model):
    options = SETTINGS[name]
    wanted = oracle.given(
        model, PROMPT, FREE[:9], seed=0, sample=0, min_new_tokens=6, end_ids=[A, B], **options
    )
    options = options | dict(min_new_tokens=6, end_token_ids=[A, B])
    found = csd.logprobs(model, PROMPT, [FREE[:9]], **options)
    assert found.logprobs[0].tolist() == pytest.approx(wanted[0])


@few(2)
@pytest.mark.parametrize("name", ["min_new_tokens", "suppress_tokens", "bad_words_ids"])
@pytest.mark.parametrize("ends", [[], [20, 30]])
def test_hf_generate_ends_where_a_plain_loop_does(name, ends, model):
    free = oracle.generate(model, PROMPT, seed=3, sample=0, max_new_tokens=12)[0]
    ends = [free[4], free[6], *ends]
    value = {"min_new_tokens": 6, "suppress_tokens": [free[4]], "bad_words_ids": [[free[4]]]}[name]
    params = {"bad_words_ids": "bad_words"}.get(name, name)
    # transformers' own list of bad words leaves out end tokens
    params = {} if name == "bad_words_ids" else {params: value}
    want = oracle.generate(
        model, PROMPT, seed=3, sample=0, max_new_tokens=12, end_ids=ends, **params
    )[0]
    out = model.generate(
        torch.tensor([PROMPT]),
        custom_generate=csd.hf_generate,
        seed=3,
        do_sample=True,
        top_k=0,
        max_new_tokens=12,
        eos_token_id=ends,
        pad_token_id=0,
        **{name: value},
    )
    assert out[0, len(PROMPT) :].tolist() == want
