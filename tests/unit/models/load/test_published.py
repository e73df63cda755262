"""Published configurations at two layers with random weights: transformers' tokens, with drafts."""

import copy

import pytest
import torch
from helpers.oracles import oracle
from helpers.targets import few, slow
from published import LEFT, PUBLISHED, VOCAB, build, config

import csd
from csd.models.fused.config import ModelConfig

PROMPT = [(7 * i + 3) % VOCAB for i in range(20)]
TOKENS = 8
# these differ by a size from others
ALIKE = ("Phi-3-mini-4k", "gemma-3-12b")
# an eighth of the published widths; and these, where two layers of float64 take seconds
NARROW = [
    pytest.param(name, 8, id=f"{name} narrow", marks=slow if name in ALIKE else ())
    for name in PUBLISHED
]
WIDE = [
    pytest.param(name, 1, id=name, marks=slow)
    for name in PUBLISHED
    if PUBLISHED[name]["hidden_size"] <= 2048
]


def drawn(engine, budget, **params):
    fixed = dict(num_samples=2, seed=4, max_new_tokens=TOKENS, end_token_ids=[])
    return engine.generate(PROMPT, budget=budget, **fixed | params)


@few(3)
@pytest.mark.parametrize(("name", "divisor"), [*NARROW, *WIDE])
def test_float64_tokens_are_those_of_a_loop_over_the_module(name, divisor):
    model = build(PUBLISHED[name], torch.float64, divisor)
    params = dict(temperature=0.8, top_p=0.95)
    loop = [
        oracle.generate(model, PROMPT, seed=4, sample=i, max_new_tokens=TOKENS, **params)
        for i in range(2)
    ]
    engine = csd.Engine(model)
    assert engine.decoder.name == "fused"
    for budget in (0, 16):
        out = drawn(engine, budget, **params)
        assert out.tokens == [tokens for tokens, *_ in loop]
        for sample, (_, want, *_) in zip(out, loop, strict=True):
            assert sample.logprobs == pytest.approx(want, abs=2e-5)
    near = apart(out, loop)
    # the comparison can fail: one head's values in the place of another's
    with torch.no_grad():
        out_proj = model.model.layers[1].self_attn.o_proj.weight
        out_proj.copy_(out_proj.roll(model.model.layers[1].self_attn.head_dim, dims=1))
    assert apart(drawn(engine, 16, **params), loop) > 10 * near


def apart(out, loop):
    """The largest difference of first tokens' raw log-probabilities, whose prompt is the same."""
    return max(abs(s.raw_logprobs[0] - found[2][0]) for s, found in zip(out, loop, strict=True))


@few(3)
@pytest.mark.parametrize(("name", "divisor"), NARROW)
def test_bfloat16_is_as_near_to_float64_as_the_module(name, divisor):
    model = build(PUBLISHED[name], torch.bfloat16, divisor)
    text = drawn(csd.Engine(model), 16, temperature=1.0, num_samples=12)
    wide = copy.deepcopy(model)
    for weight in wide.parameters():
        weight.data = weight.data.double()
    off: dict[str, list] = {"csd": [], "own": []}
    for sample in text:
        own, exact = (logprobs(m, sample.tokens) for m in (model, wide))
        off["csd"].append((torch.tensor(sample.logprobs, dtype=torch.float64) - exact).abs())
        off["own"].append((own - exact).abs())
    # the median: a row whose experts are nearly tied takes others by rounding alone
    middle = {side: torch.cat(found).median() for side, found in off.items()}
    assert 0 < middle["csd"] <= 2 * middle["own"]


@torch.no_grad()
def logprobs(model, tokens):
    logits = model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens]


@pytest.mark.parametrize("name", LEFT)
def test_a_published_config_that_is_not_fused_is_named(name):
    facts, message = LEFT[name]
    facts = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2) | facts
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_transformers(config(facts))
