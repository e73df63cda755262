"""`csd.logprobs` of models with adapters of peft."""

import pytest
import torch
from helpers.models.lora_models import PROMPT, adapted
from helpers.oracles.plain_gradients import chances, gradients, weighted, within_plain

import csd

SAMPLED = dict(num_samples=3, seed=4, max_new_tokens=20, end_token_ids=[], budget=12)
MODELS = 6  # with different weights
FILTERS = dict(temperature=0.7, top_p=0.9)
CASES = [
    pytest.param(torch.float32, None, id="float32"),
    pytest.param(torch.bfloat16, None, id="bfloat16"),
    # as peft makes them
    pytest.param(torch.bfloat16, torch.float32, id="bfloat16 with float32 adapters"),
]


def made(dtype, adapters=None, **more):
    model = adapted(dtype=dtype, **more)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name and ".default." in name)
        if adapters is not None and "lora_" in name:
            weight.data = weight.data.to(adapters)
    return model


@pytest.mark.parametrize(("dtype", "adapters"), CASES)
def test_values_have_the_bits_of_sampling_with_the_active_adapters(dtype, adapters):
    model = made(dtype, adapters)

    def compared():
        with csd.Engine(model, exact=True) as engine:
            drawn = engine.generate(PROMPT, **SAMPLED, **FILTERS)
        out = csd.logprobs(model, PROMPT, drawn.tokens, **FILTERS)
        assert out.exact
        assert [x.tolist() for x in out.logprobs] == drawn.logprobs
        assert [x.tolist() for x in out.raw_logprobs] == drawn.raw_logprobs
        return drawn.logprobs

    first = compared()
    model.set_adapter("other")
    other = compared()
    with model.disable_adapter():
        base = compared()
    assert first != other != base != first
    # a training step
    model.set_adapter("default")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.01)
    assert compared() != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_of_adapters_err_as_plain_ones(name, dtype):
    model = made(dtype, name=name)
    drawn = csd.generate(model, PROMPT, **SAMPLED).tokens
    within_plain(
        [made(dtype, name=name, seed=seed) for seed in range(MODELS)],
        lambda m: csd.logprobs(m, PROMPT, drawn).raw_logprobs,
        lambda m: chances(m, PROMPT, drawn),
    )


def test_passes_do_not_disturb_each_others_gradients():
    """Another pass, with other adapters, between a pass and its backward."""
    model = made(torch.float32)
    drawn = csd.generate(model, PROMPT, **SAMPLED).tokens
    want = gradients(model, weighted(csd.logprobs(model, PROMPT, drawn).logprobs))
    first = csd.logprobs(model, PROMPT, drawn)
    with torch.no_grad(), model.disable_adapter():
        csd.logprobs(model, PROMPT, drawn)
    csd.logprobs(model, PROMPT, drawn)
    found = gradients(model, weighted(first.logprobs))
    assert all(torch.equal(found[name], grad) for name, grad in want.items())


def test_dropout_of_adapters_is_refused():
    model = made(torch.float32, lora_dropout=0.1)
    csd.logprobs(model, PROMPT, [[1]])
    with pytest.raises(ValueError, match=r"lora_dropout.* has dropout 0\.1 in training mode"):
        csd.logprobs(model.train(), PROMPT, [[1]])
