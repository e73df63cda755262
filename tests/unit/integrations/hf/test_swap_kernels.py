"""`csd.apply_kernels` on stock transformers models."""

import copy
import pickle
from importlib import import_module

import pytest
import torch
import transformers
from helpers.checks.precision import gradient_within_eager, within_eager
from helpers.models import checkpoints

import csd
from csd.integrations.transformers import swap

pytestmark = pytest.mark.compiled

norms = import_module("csd.kernels.layers.rms_norm")
rotations = import_module("csd.kernels.layers.rotary")
gates = import_module("csd.kernels.layers.swiglu")

FAMILIES = pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
IDS = torch.randint(checkpoints.VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(3, 9, dtype=torch.long)
MASK[1, :4] = 0


def logits(model):
    with torch.no_grad():
        return model(IDS, attention_mask=MASK).logits


@pytest.fixture
def calls(monkeypatch):
    """Counts of the kernels' runs, taken where the model calls them."""
    count = dict.fromkeys(("rms_norm", "rotate", "silu_mul"), 0)

    def counted(name, op):
        def call(*args):
            count[name] += 1
            return op(*args)

        return call

    for name in count:
        monkeypatch.setattr(swap, name, counted(name, getattr(swap, name)))
    return count


@FAMILIES
def test_applied_and_taken_off(family, calls):
    # in float64 a CPU runs the references, which compute what transformers does, one by one
    model = checkpoints.build(family, dtype=torch.float64)
    before = logits(model)
    assert csd.apply_kernels(model) is True
    assert torch.equal(logits(model), before)
    layers = model.config.num_hidden_layers
    norms_a_layer = 4 if family == "qwen3" else 2
    expected = dict(rms_norm=norms_a_layer * layers + 1, rotate=layers, silu_mul=layers)
    assert calls == expected
    # to apply them again is to have them
    assert csd.apply_kernels(model) is True
    assert torch.equal(logits(model), before)
    assert calls == {name: 2 * times for name, times in expected.items()}
    assert csd.remove_kernels(model) is True
    assert csd.remove_kernels(model) is False
    assert torch.equal(logits(model), before)
    assert calls == {name: 2 * times for name, times in expected.items()}
    assert not any("forward" in vars(m) for m in model.modules())


@FAMILIES
def test_triton_kernels_within_the_error_of_the_dtype(family, monkeypatch, poison):
    model, exact = checkpoints.build(family), logits(checkpoints.build(family, dtype=torch.float64))
    eager = logits(model)
    monkeypatch.setattr(
        swap, "rms_norm", lambda *a: norms.rms_norm_triton(*(x.contiguous() for x in a[:2]), a[2])
    )
    monkeypatch.setattr(swap, "rotate", rotations.rotate_triton)
    monkeypatch.setattr(swap, "silu_mul", gates.silu_mul_triton)
    assert csd.apply_kernels(model)
    within_eager(logits(model), eager, exact, model.config.intermediate_size)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_equal_stock(family):
    model = checkpoints.build(family)
    ours, exact = copy.deepcopy(model), checkpoints.build(family, dtype=torch.float64)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert csd.apply_kernels(ours)
    models = ours, exact, model, other
    for m in models:
        m(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for named in zip(*(m.named_parameters() for m in models), strict=True):
        got, right, *stock = (parameter.grad for _, parameter in named)
        assert right.abs().max() > 0, named[0][0]
        length = max(IDS.numel(), model.config.intermediate_size)
        gradient_within_eager(got, stock, right, length)


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_trained_under_autocast(family, dtype):
    """Projections are narrow there, norms' weights and the rotary tables are not."""
    model = checkpoints.build(family)
    ours, exact = copy.deepcopy(model), checkpoints.build(family, dtype=torch.float64)
    assert csd.apply_kernels(ours)
    outs = [exact(IDS, attention_mask=MASK, labels=IDS)]
    outs[0].loss.backward()
    for m in (model, ours):
        with torch.autocast("cpu", dtype=dtype):
            outs.append(m(IDS, attention_mask=MASK, labels=IDS))
        outs[-1].loss.backward()
    assert outs[2].logits.dtype == outs[1].logits.dtype
    right, want, got = (out.logits for out in outs)
    within_eager(got, want, right, model.config.intermediate_size, dtype)
    for x in zip(*(m.parameters() for m in (ours, model, exact)), strict=True):
        within_eager(*(parameter.grad for parameter in x), 1, dtype)


def test_generate_works_before_and_after():
    model, other = (checkpoints.build("qwen2", dtype=torch.float64) for _ in range(2))
    options = dict(num_samples=3, max_new_tokens=10, temperature=0.8, seed=1)
    want = csd.generate(other, [5, 6, 7], **options).tokens
    before = logits(model)
    assert csd.apply_kernels(model)
    assert csd.generate(model, [5, 6, 7], **options).tokens == want
    # its weights are views of the engine's now, and the kernels stay
    assert torch.equal(logits(model), before)
    assert csd.remove_kernels(model) is True
    assert csd.apply_kernels(model) is True
    assert csd.generate(model, [5, 6, 7], **options).tokens == want


@FAMILIES
def test_a_swapped_model_is_saved_whole(family, calls):
    model = checkpoints.build(family, dtype=torch.float64)
    before = logits(model)
    assert csd.apply_kernels(model)
    packed = pickle.dumps(model)
    # as in a process that has swapped nothing
    swap._rotating.clear()
    other = pickle.loads(packed)
    assert sum(calls.values()) == 0
    assert torch.equal(logits(other), before)
    layers = model.config.num_hidden_layers
    assert calls["rotate"] == calls["silu_mul"] == layers < calls["rms_norm"]
    assert csd.remove_kernels(other) is True
    assert csd.remove_kernels(model) is True


def test_layers_that_came_later_are_swapped_too(calls):
    model, other = checkpoints.build("llama"), checkpoints.build("llama")
    assert csd.apply_kernels(model)
    before = logits(model)
    whole = dict(calls)
    model.model.layers[0] = other.model.layers[0]
    assert csd.apply_kernels(model) is True
    assert logits(model).shape == before.shape
    assert calls == {name: 2 * times for name, times in whole.items()}


def test_a_swapped_model_compiles_whole():
    model = checkpoints.build("llama")
    assert csd.apply_kernels(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        got, want = (m(IDS, use_cache=False).logits for m in (compiled, model))
    assert torch.equal(got, want)


def test_a_copy_of_a_swapped_model_is_its_own():
    model = checkpoints.build("llama")
    assert csd.apply_kernels(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert logits(model).abs().max() > 0 and logits(other).abs().max() == 0


def test_with_the_tree_attention():
    model = checkpoints.build("qwen3")
    before = logits(model)
    model.set_attn_implementation("csd_tree")
    assert csd.apply_kernels(model)
    with torch.no_grad():
        prefill = model(torch.tensor([[3, 4, 5]])).past_key_values
        tree = csd.TreeCache([prefill], [1], 8).tree([[6, 7, 8]], [[-1, 0, 1]])
        out = model(**tree.inputs).logits[0]
        want, exact = (
            checkpoints.build("qwen3", dtype=d)(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits[0, 3:]
            for d in (torch.float32, torch.float64)
        )
    within_eager(out, want, exact, model.config.intermediate_size)
    right = logits(checkpoints.build("qwen3", dtype=torch.float64))
    within_eager(logits(model), before, right, model.config.intermediate_size)


def test_refused_models():
    gelu = checkpoints.build("llama", hidden_act="gelu")
    with pytest.raises(TypeError, match="hidden_act must be silu, got 'gelu'"):
        csd.apply_kernels(gelu)
    hooked = checkpoints.build("llama")
    hooked.model.norm.forward = hooked.model.norm.forward
    with pytest.raises(TypeError, match="a LlamaRMSNorm already has a replaced forward"):
        csd.apply_kernels(hooked)
    for model in (gelu, hooked):
        assert sum("forward" in vars(m) for m in model.modules()) == (model is hooked)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)
    with pytest.raises(TypeError, match=r"of Llama, Mistral, Qwen2, Qwen3 .* GPT2LMHeadModel"):
        csd.apply_kernels(transformers.GPT2LMHeadModel(config))
