"""Packed weights: the products of the plain ones, and no second copy."""

import gc
import weakref

import pytest
import torch
from helpers.checks.precision import within_eager
from helpers.kernels.loops import loops_multiply
from helpers.models import checkpoints
from helpers.oracles.dense import Dense, some_tokens

import csd
from csd.models.fused.fuse import fuse, pack
from csd.models.fused.linear import in_loops, linear, onednn_multiplies, packed
from csd.models.load import load

DTYPES = [d for d in (torch.float32, torch.bfloat16) if onednn_multiplies(d)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="this CPU or build has no oneDNN products")


def is_packed(weight):
    # loops multiply some plain matrices too, by their size
    return weight.is_mkldnn or weight.dim() == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_the_plain_one(dtype, rows, biased):
    generator = torch.manual_seed(0)
    x, weight = (torch.randn(n, 48, generator=generator).to(dtype) for n in (rows, 40))
    bias = torch.randn(40, generator=generator).to(dtype) if biased else None
    got, want = linear(x, packed(weight), bias), linear(x.double(), weight.double())
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    # a sum of 48 products in float32, and the roundings to the dtype of it and of the bias' sum
    limit = 49 * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps * size
    assert got.dtype == dtype and got.shape == (rows, 40)
    assert ((got.double() - want).abs() <= limit).all()


@pytest.mark.parametrize("tied", [False, True])
def test_packing_keeps_no_plain_matrix(tied):
    decoder = fuse(checkpoints.build("qwen2", tied=tied))
    plain = [weakref.ref(x) for layer in decoder.layers for x in (layer.qkv, layer.gate_up)]
    before = Dense(decoder).logits(some_tokens(20))
    pack(decoder)
    gc.collect()
    assert not any(ref() for ref in plain)
    assert all(is_packed(w) for x in decoder.layers for w in (x.qkv, x.out, x.gate_up, x.down))
    assert is_packed(decoder.head) and not is_packed(decoder.embedding)
    exact = fuse(checkpoints.build("qwen2", tied=tied).double())
    want = Dense(exact).logits(some_tokens(20))
    within_eager(Dense(decoder).logits(some_tokens(20)), before, want, 64)


def test_a_tied_head_stays_plain_where_memory_is_short(monkeypatch):
    monkeypatch.setattr("csd.models.fused.fuse.free_bytes", lambda device: 10_000)
    decoder = fuse(checkpoints.build("llama", tied=True))
    pack(decoder)
    assert is_packed(decoder.layers[0].qkv) and not is_packed(decoder.head)


def test_a_module_s_weights_stay_its_own(checkpoint):
    module = checkpoints.build("llama")
    assert not is_packed(load(module).decoder.layers[0].qkv)
    assert is_packed(load(checkpoint("llama")).decoder.layers[0].qkv)


EVEN = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_samples_of_loops_are_exact_by_default(monkeypatch, tmp_path, family, dtype):
    """Each dtype's own product is the loop, and no row count is tried to find that out."""
    pytest.importorskip("numba")
    monkeypatch.setattr("csd.models.exact_products.row_blocks", None)
    loops_multiply(monkeypatch)
    path = checkpoints.make(family, tmp_path / family, **EVEN)
    with csd.Engine(path, dtype=dtype, max_slots=5) as engine:
        assert in_loops(engine.decoder.head) and in_loops(engine.decoder.layers[0].down)
        drawn = [
            csd.generate(
                engine,
                [5, 6, 7],
                num_samples=n,
                seed=1,
                max_new_tokens=40,
                ignore_eos=True,
                budget=budget,
            )
            for n, budget in ((5, 16), (5, 0), (2, 0))
        ]
    assert drawn[0].stats.nodes_proposed > 0
    assert drawn[0].tokens == drawn[1].tokens and drawn[0].tokens[:2] == drawn[2].tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_samples_of_packed_weights_do_not_depend_on_drafts(checkpoint, dtype):
    with csd.Engine(checkpoint("llama"), dtype=dtype, max_slots=4, exact=True) as engine:
        assert is_packed(engine.decoder.layers[0].qkv)
        drawn = [
            csd.generate(
                engine,
                [5, 6, 7],
                num_samples=4,
                seed=1,
                max_new_tokens=40,
                ignore_eos=True,
                budget=budget,
            )
            for budget in (16, 0)
        ]
    assert drawn[0].stats.nodes_proposed > 0
    assert drawn[0].tokens == drawn[1].tokens
