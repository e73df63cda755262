"""Modules that compute something else than their class are refused, others are not."""

import functools
import types

import pytest
import torch
from helpers.models import checkpoints
from helpers.oracles.oracle import generate as plain
from helpers.targets import few
from torch import nn

import csd
from csd.models.fused.fusable import checked_config


def steer(module, args, output):
    return output


def layer(model):
    return model.model.layers[1]


def hook_on_a_layer(model):
    layer(model).register_forward_hook(steer)


def pre_hook_on_the_head(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: args)


def hook_with_kwargs(model):
    layer(model).self_attn.register_forward_hook(lambda *a, **k: None, with_kwargs=True)


def bound_forward(model):
    def forward(self, x):
        return x

    layer(model).mlp.forward = types.MethodType(forward, layer(model).mlp)


def wrapped_forward(model):
    stock = model.model.norm.forward

    @functools.wraps(stock)
    def forward(x):
        return stock(x) * 1.1

    model.model.norm.forward = forward


def partial_forward(model):
    model.lm_head.forward = functools.partial(lambda x, y: y, 1)


def anothers_forward(model):
    mlp = layer(model).mlp
    mlp.forward = mlp.gate_proj.forward


def subclass(model):
    class Mine(type(layer(model).mlp)):
        def forward(self, x):
            return super().forward(x) * 2

    layer(model).mlp.__class__ = Mine


def subclass_that_is_called(model):
    class Mine(type(layer(model))):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    layer(model).__class__ = Mine


def another_module(model):
    class Mine(nn.Module):
        def forward(self, x):
            return x

    layer(model).mlp.act_fn = Mine()


def another_activation(model):
    layer(model).mlp.act_fn = nn.GELU()


def another_epsilon(model):
    layer(model).post_attention_layernorm.variance_epsilon = 1e-2


def another_scaling(model):
    layer(model).self_attn.scaling *= 2


def rotary_scaling(model):
    model.model.rotary_emb.attention_scaling = 1.2


def window(model):
    layer(model).self_attn.sliding_window = 16


def both_ways(model):
    layer(model).self_attn.is_causal = False


def fewer_layers(model):
    del model.model.layers[1]


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model.model.embed_tokens)


def embedding_norm(model):
    model.model.embed_tokens.max_norm = 1.0


def attention_function(model):
    from transformers import AttentionInterface

    AttentionInterface.register("mine", lambda *args, **kwargs: None)
    model.config._attn_implementation = "mine"


CHANGES = {
    hook_on_a_layer: r"model.layers.1 has a forward hook \(steer\)",
    pre_hook_on_the_head: "lm_head has a forward hook",
    hook_with_kwargs: "model.layers.1.self_attn has a forward hook",
    bound_forward: "model.layers.1.mlp computes with bound_forward",
    wrapped_forward: "model.norm computes with ",
    partial_forward: "lm_head computes with partial_forward",
    anothers_forward: "model.layers.1.mlp computes with ",
    subclass: "model.layers.1.mlp computes with the forward of a .*Mine",
    subclass_that_is_called: "model.layers.1 computes with the forward of a .*Mine",
    another_module: "model.layers.1.mlp.act_fn computes with a .*Mine",
    another_activation: r"model.layers.1.mlp.act_fn must be SiLU, .* got GELU",
    another_epsilon: r"layers.1.post_attention_layernorm.variance_epsilon must be 1e-06, .*0.01",
    another_scaling: r"model.layers.1.self_attn.scaling must be 0.25, .*got 0.5",
    rotary_scaling: "model.rotary_emb.attention_scaling must be 1.0, .*got 1.2",
    window: "model.layers.1.self_attn.sliding_window must be None, .*got 16",
    both_ways: "model.layers.1.self_attn.is_causal must be True, .*got False",
    fewer_layers: r"len\(model.layers\) must be 2, .*got 1",
    parametrized: "model.embed_tokens has parametrizations",
    embedding_norm: "model.embed_tokens.max_norm must be None, .*got 1.0",
    attention_function: "the attention 'mine' is ",
}


@few(4)
@pytest.mark.parametrize(
    ("change", "message"), CHANGES.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_a_changed_module_is_refused_before_and_after_a_call(change, message):
    model = checkpoints.build("llama")
    fused = dict(decoder="fused", max_new_tokens=2)
    first = csd.generate(model, [5, 6], seed=0, **fused).tokens
    change(model)
    with pytest.raises((TypeError, ValueError), match=message):
        csd.generate(model, [5, 6], **fused)
    with pytest.raises((TypeError, ValueError), match=message):
        csd.Engine(model, decoder="fused")
    csd.release()
    assert first


# neither decoder runs them: no pass, other tokens than its own pass, no attention that is known
BY_NEITHER = (partial_forward, anothers_forward, both_ways, attention_function)


@few(4)
@pytest.mark.parametrize(
    ("change", "message"), CHANGES.items(), ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.filterwarnings("ignore:csd uses the module")
def test_a_changed_module_is_drawn_as_it_is_or_refused(change, message):
    model = checkpoints.build("llama", dtype=torch.float64)
    csd.generate(model, [5, 6], max_new_tokens=2)
    change(model)
    prompt, settings = [5, 6, 7, 5, 6, 7, 8], dict(max_new_tokens=8, seed=0, temperature=0.8)
    if change in BY_NEITHER:
        with pytest.raises((TypeError, ValueError), match=message):
            csd.generate(model, prompt, **settings)
    else:
        out = csd.generate(model, prompt, end_token_ids=[], budget=8, **settings)
        assert out.tokens == [plain(model, prompt, sample=0, **settings)[0]]
    csd.release()


def test_a_hook_that_was_removed_is_served_again():
    model = checkpoints.build("qwen3")
    want = csd.generate(model, [5, 6], max_new_tokens=3, seed=0, decoder="fused").tokens
    handle = layer(model).register_forward_hook(steer)
    with pytest.raises(TypeError, match="forward hook"):
        csd.generate(model, [5, 6], max_new_tokens=3, seed=0, decoder="fused")
    handle.remove()
    after = csd.generate(model, [5, 6], max_new_tokens=3, seed=0, decoder="fused")
    assert after.tokens == want
    csd.release()


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm", "LlamaAttention", "LlamaModel"])
def test_a_class_that_was_changed_is_refused(monkeypatch, name):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(getattr(modeling_llama, name), "forward", lambda self, *a, **k: a[0])
    with pytest.raises(TypeError, match="computes with"):
        checked_config(checkpoints.build("llama"))


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "eager_attention_forward"])
def test_a_function_of_the_family_that_was_changed_is_refused(monkeypatch, name):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, name, lambda *a, **k: None)
    with pytest.raises(TypeError, match=f"modeling_llama.{name} is "):
        checked_config(checkpoints.build("llama"))


def test_a_global_hook_is_refused():
    model = checkpoints.build("llama")
    handle = nn.modules.module.register_module_forward_hook(steer)
    try:
        with pytest.raises(TypeError, match=r"torch.nn \(all modules\) has a forward hook"):
            checked_config(model)
    finally:
        handle.remove()


def require_grads(model):
    model.enable_input_require_grads()


def checkpointing(model):
    model.train()
    model.gradient_checkpointing_enable()


def kernels(model):
    csd.apply_kernels(model)


def accelerate_bf16(model):
    """Wrap a model for mixed precision as `Accelerator.prepare_model` does."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model._original_forward = model.forward
    model.forward = types.MethodType(autocast(model.forward.__func__), model)
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)


def accelerate_devices(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))


def noted_outputs(model):
    model(torch.tensor([[5]]), output_hidden_states=True)


def subclass_without_a_forward(model):
    model.__class__ = type("Mine", (type(model),), {"extra": 1})


def backward_hook(model):
    model.lm_head.register_full_backward_hook(lambda *args: None)


KEEPS = [
    require_grads,
    checkpointing,
    kernels,
    accelerate_bf16,
    accelerate_devices,
    noted_outputs,
    subclass_without_a_forward,
    backward_hook,
]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("change", KEEPS, ids=lambda f: f.__name__)
def test_what_changes_no_value_is_served(family, change):
    model = checkpoints.build(family)
    want = checked_config(model)
    change(model)
    assert checked_config(model) == want
