"""`csd.logprobs` of a GGUF file's packed weights: the bits of sampling, and adapters' gradients."""

import copy

import pytest
import torch
from helpers.models.packed_files import CASES, dequantized, write
from helpers.oracles.plain_gradients import chances, gradients, weighted

import csd
from csd.kernels.layers.quantized import has_loop, unrounded

peft = pytest.importorskip("peft")
pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not has_loop(), reason="no loop of quantised weights here")

PROMPT = [(7 * i + 3) % 61 for i in range(20)]
SAMPLED = dict(num_samples=3, seed=4, max_new_tokens=20, end_token_ids=[], budget=12)
FILTERS = dict(temperature=0.7, top_p=0.9)
# an adapter of an expert's matrix is no LoRA of a Linear
TARGETS = {"qwen3moe": ["q_proj", "k_proj", "v_proj", "o_proj"]}
# float32's rounding through three layers, whose weights multiply it. Rounded activations differ by
# 0.1 and more
NEAR = 2e-3


@pytest.fixture(scope="module", params=CASES)
def file(request, tmp_path_factory):
    return request.param, write(request.param, tmp_path_factory.mktemp("packed"))


def adapted(name, path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=TARGETS.get(name, "all-linear"))
    model = peft.get_peft_model(csd.gguf_module(path), config).eval()
    for part, weight in model.named_parameters():
        if "lora_" in part:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def listed(values):
    return [torch.as_tensor(x).tolist() for x in values]


def test_values_have_the_bits_of_samples_with_and_without_an_adapter(file):
    name, path = file
    model, drawn = csd.gguf_module(path), csd.generate(path, PROMPT, **SAMPLED, **FILTERS)
    assert drawn.tokens == csd.generate(model, PROMPT, **SAMPLED, **FILTERS).tokens
    for out in (
        csd.logprobs(model, PROMPT, drawn.tokens, **FILTERS),
        csd.score(path, PROMPT, drawn.tokens, **FILTERS),
    ):
        assert listed(out.logprobs) == drawn.logprobs
        assert listed(out.raw_logprobs) == drawn.raw_logprobs
    with_adapter = adapted(name, path)
    other = csd.generate(with_adapter, PROMPT, **SAMPLED, **FILTERS)
    out = csd.logprobs(with_adapter, PROMPT, other.tokens, **FILTERS)
    assert out.exact and listed(out.logprobs) == other.logprobs != drawn.logprobs
    with with_adapter.disable_adapter():
        assert csd.generate(with_adapter, PROMPT, **SAMPLED, **FILTERS).tokens == drawn.tokens


def test_gradients_are_those_of_the_dequantised_weights(file):
    model = adapted(*file)
    completions = csd.generate(model, PROMPT, **SAMPLED).tokens
    with unrounded():
        values = csd.logprobs(model, PROMPT, completions).raw_logprobs
        found = gradients(model, weighted(values))
    plain = dequantized(model)
    want = chances(plain, PROMPT, completions)
    for x, y in zip(values, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=NEAR)
    for name, grad in gradients(plain, weighted(want)).items():
        assert (found[name] - grad).norm() <= NEAR * grad.norm(), name


def test_recomputed_layers_give_the_same_gradient(file):
    model = adapted(*file)
    completions = csd.generate(model, PROMPT, **SAMPLED).tokens
    found = []
    for checkpoint in (False, True):
        out = csd.logprobs(model, PROMPT, completions, checkpoint=checkpoint)
        found.append(gradients(model, weighted(out.raw_logprobs)))
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_copies_share_the_packed_weights(file, tmp_path):
    model = csd.gguf_module(file[1])
    made = copy.deepcopy(model)
    for (name, weight), (_, other) in zip(
        model.named_parameters(), made.named_parameters(), strict=True
    ):
        packed = type(weight.data) is not torch.Tensor
        assert (weight.data_ptr() == other.data_ptr()) is packed, name
    with pytest.raises(NotImplementedError, match="has no storage of float32"):
        model.save_pretrained(tmp_path)
