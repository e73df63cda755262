"""A model that csd has fused: one copy of the weights, and still the user's own module."""

import copy
from pathlib import Path

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.replacing import REPLACED, perturb
from helpers.oracles.dense import Dense, assert_near, some_tokens, their_logits

from csd.models.fused.fuse import is_fused
from csd.models.load import load

pytestmark = pytest.mark.quick

FAMILY = pytest.mark.parametrize("family", checkpoints.FAMILIES)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
TOKENS = some_tokens(24)


def tensors(decoder) -> list[torch.Tensor]:
    """The decoder's weights."""
    found = [decoder.embedding, decoder.norm, decoder.head]
    for layer in decoder.layers:
        given = map(layer.__getattribute__, layer.__slots__)
        found += [x for x in given if isinstance(x, torch.Tensor)]
    return found


def storages(found) -> dict[int, int]:
    """Bytes by the address of the memory that the tensors lie in."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}


def assert_same(decoder, model) -> torch.Tensor:
    """csd's logits are the module's. Returns them."""
    want, exact = their_logits(model, TOKENS), None
    if want.dtype != torch.float64:
        exact = their_logits(copy.deepcopy(model).double(), TOKENS)
    assert_near(decoder, Dense(decoder).logits(TOKENS), want, exact)
    return want


@pytest.fixture
def model():
    return checkpoints.build("qwen2", dtype=torch.float64)


@TIED
@FAMILY
def test_one_copy(family, tied):
    """Everything the decoder reads is the module's memory, and the parameters are as they were."""
    model = checkpoints.build(family, tied=tied, dtype=torch.float64)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    size = sum(p.nbytes for p in model.parameters())
    decoder = load(model).decoder
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, p in after.items():
        assert id(p) == before[name][0], name
        assert torch.equal(p, before[name][1]) and p.requires_grad, name
    ours = storages(tensors(decoder))
    assert ours == storages(after.values())
    assert sum(ours.values()) == size
    assert is_fused(model, decoder)


@FAMILY
def test_every_weight_is_shared(family):
    """A change of any one parameter reaches the decoder."""
    model = checkpoints.build(family, dtype=torch.float64)
    decoder = load(model).decoder
    logits = assert_same(decoder, model)
    for name, param in model.named_parameters():
        param.data.mul_(1.01).add_(0.01)
        after = assert_same(decoder, model)
        assert (after - logits).abs().max() > 1e-6, name
        logits = after


def test_an_optimiser_made_before_moves_the_decoder(model):
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    loaded = load(model)
    before = assert_same(loaded.decoder, model)
    for _ in range(2):
        optimiser.zero_grad()
        model(TOKENS[None], labels=TOKENS[None]).loss.backward()
        optimiser.step()
    assert not loaded.refresh()
    after = assert_same(loaded.decoder, model)
    assert (after - before).abs().max() > 0.1
    assert all(p.grad is not None for p in model.parameters())


@TIED
@FAMILY
def test_save_pretrained_writes_the_same_model(tmp_path, family, tied):
    model = checkpoints.build(family, tied=tied)
    model.save_pretrained(tmp_path / "before")
    load(model)
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / when / "model.safetensors" for when in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # both packed, as a user's module is not
    first, again = (load(tmp_path / when).decoder for when in ("before", "after"))
    assert torch.equal(Dense(again).logits(TOKENS), Dense(first).logits(TOKENS))


def test_a_state_dict_round_trips(tmp_path, model):
    decoder = load(model).decoder
    want = assert_same(decoder, model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    size = sum(p.nbytes for p in model.parameters())
    assert Path(tmp_path / "weights.pt").stat().st_size < 1.5 * size
    saved = torch.load(tmp_path / "weights.pt")
    perturb(model)
    assert not torch.equal(assert_same(decoder, model), want)
    # without assign=True tensors stay where they are
    model.load_state_dict(saved)
    assert is_fused(model, decoder)
    assert torch.equal(assert_same(decoder, model), want)


@pytest.mark.parametrize("change", REPLACED, ids=lambda f: f.__name__)
def test_replaced_weights_are_noticed(model, change):
    loaded = load(model)
    assert not loaded.refresh()
    change(model)
    assert loaded.refresh()
    assert not loaded.refresh()
    dtype = model.lm_head.weight.dtype
    assert loaded.dtype == loaded.decoder.cos.dtype == dtype
    assert loaded.config.vocab == model.lm_head.weight.shape[0]
    assert_same(loaded.decoder, model)
    # still one copy
    parameters = list(model.parameters())
    assert storages(tensors(loaded.decoder)) == storages(parameters)
    assert sum(storages(parameters).values()) == sum(p.nbytes for p in parameters)


@FAMILY
def test_any_replaced_parameter_is_noticed(family):
    model = checkpoints.build(family, dtype=torch.float64)
    loaded = load(model)
    for name, param in model.named_parameters():
        param.data = param.data.clone()
        assert loaded.refresh(), name
        assert not loaded.refresh(), name
    assert_same(loaded.decoder, model)


def other_order(model):
    """Queries, keys and values in one memory already, but not in the order of the decoder."""
    for layer in model.model.layers:
        a = layer.self_attn
        modules = (a.v_proj, a.q_proj, a.k_proj)
        whole = torch.cat([m.weight.data for m in modules])
        for m, view in zip(modules, whole.split([m.out_features for m in modules]), strict=True):
            m.weight.data = view


def columns_first(model):
    """In the decoder's order, but the square matrix of the queries is stored by columns."""
    for layer in model.model.layers:
        a = layer.self_attn
        modules = (a.q_proj, a.k_proj, a.v_proj)
        rows = [m.out_features for m in modules]
        whole = torch.cat([a.q_proj.weight.data.T, a.k_proj.weight.data, a.v_proj.weight.data])
        for m, view in zip(modules, whole.split(rows), strict=True):
            m.weight.data = view.T if m is a.q_proj else view


@pytest.mark.parametrize("place", [other_order, columns_first], ids=lambda f: f.__name__)
def test_weights_that_share_memory_otherwise(model, place):
    want = their_logits(model, TOKENS)
    place(model)
    assert (assert_same(load(model).decoder, model) - want).abs().max() < 1e-9


def test_two_engines_share_a_model(model):
    """The second finds the model fused and leaves the first's weights alone."""
    first, second = load(model), load(model)
    assert storages(tensors(first.decoder)) == storages(tensors(second.decoder))
    assert not first.refresh() and not second.refresh()
    assert torch.equal(first.decoder.layers[1].qkv, second.decoder.layers[1].qkv)
    perturb(model)
    assert torch.equal(assert_same(first.decoder, model), assert_same(second.decoder, model))


def test_a_loaded_folder_has_no_module(checkpoint):
    loaded = load(checkpoint("qwen2"))
    assert loaded.module is None and not loaded.refresh()
    size = checkpoints.build("qwen2").num_parameters() * 4
    # packed tensors have no storage that can be asked for
    assert sum(x.nbytes for x in tensors(loaded.decoder)) == size
