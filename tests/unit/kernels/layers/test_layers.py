"""`csd.kernels` as a library: functions by name, and modules against transformers' own."""

import inspect

import pytest
import torch
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig

import csd.kernels
from csd.kernels import GatedMLP, RMSNorm, Rotary

CONFIG = LlamaConfig(
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    rope_theta=5000.0,
)
KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])


def test_names_are_functions_and_classes():
    for name in csd.kernels.__all__:
        found = getattr(csd.kernels, name)
        assert inspect.isfunction(found) or inspect.isclass(found), name
    assert dir(csd.kernels) == sorted(csd.kernels.__all__)
    # modules of the same name stay there for who imports from them
    from csd.kernels.layers.rms_norm import rms_norm_ref

    assert inspect.isfunction(rms_norm_ref)
    assert inspect.ismodule(csd.kernels.common.noise)


def close(got, want):
    room = 4 * torch.finfo(want.dtype).eps * float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=room)


@KINDS
def test_norm_and_mlp_are_transformers(dtype):
    x = torch.randn(2, 5, 48, dtype=dtype)
    norm, mlp = llama.LlamaRMSNorm(48, eps=1e-5).to(dtype), llama.LlamaMLP(CONFIG).to(dtype)
    torch.nn.init.normal_(norm.weight)
    own_norm, own_mlp = RMSNorm(48, 1e-5).to(dtype), GatedMLP(48, 80).to(dtype)
    own_norm.load_state_dict(norm.state_dict())
    own_mlp.load_state_dict(mlp.state_dict())
    close(own_norm(x), norm(x))
    close(own_mlp(x), mlp(x))


@KINDS
def test_rotary_is_transformers(dtype):
    position = torch.tensor([[0, 3, 900, 1], [7, 7, 2, 4000]])
    q, k = torch.randn(2, 4, 6, 8, dtype=dtype), torch.randn(2, 4, 2, 8, dtype=dtype)
    cos, sin = llama.LlamaRotaryEmbedding(CONFIG)(q, position)
    want = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    module = Rotary(8, base=5000.0).to(dtype)
    for got, w in zip(module(q, k, position), want, strict=True):
        assert got.dtype == dtype
        # tables are rounded to float32 at least
        torch.testing.assert_close(
            got,
            w,
            rtol=0,
            atol=4
            * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * 4000)
            * float(w.abs().max()),
        )


def test_gradients_are_transformers():
    x = torch.randn(3, 48, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    norm, mlp = RMSNorm(48), GatedMLP(48, 80, bias=True)
    mlp(norm(x)).square().sum().backward()
    y = torch.nn.functional.rms_norm(other, (48,), norm.weight, norm.eps)
    y = torch.nn.functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y)
    mlp.down_proj(y).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        Rotary(7)
    with pytest.raises(TypeError, match="x must be a tensor, got a list"):
        csd.kernels.rms_norm([1.0], torch.ones(1))
    with pytest.raises(ValueError, match="weight"):
        RMSNorm(4)(torch.randn(2, 5))
