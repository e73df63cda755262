"""All layers in one call: the bits of the operations by themselves."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.loops import loops_multiply
from helpers.models import checkpoints
from helpers.targets import few, pairs, slow

pytest.importorskip("numba")

import csd
from csd.kernels.attention.cpu import attention
from csd.kernels.layers.cpu import decoder as fused
from csd.kernels.layers.cpu import linear
from csd.kernels.layers.cpu.linear import MAX_ROWS
from csd.kernels.numba.lanes import FEATURES
from csd.kernels.ops import Ops

EVEN = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """engine(family, dtype): whose products are loops, whatever this CPU takes."""
    loops_multiply(monkeypatch)

    def make(family, dtype, plain=False, **options):
        if plain:
            model = checkpoints.build(family, dtype=dtype, **EVEN)
        else:
            model, options["dtype"] = checkpoints.make(family, tmp_path / family, **EVEN), dtype
        found = csd.Engine(model, max_slots=5, **options)
        if "forward" not in found.ops.fused:
            pytest.skip("an engine on this CPU runs no loops")
        return found

    return make


@pytest.fixture
def both(monkeypatch):
    """Every forward pass runs both ways; the rows of those that were compared."""
    rows = []

    def compare(self, decoder, token, position, attend, node_k, node_v):
        want = decoder.forward(token, position, attend, node_k, node_v, self)
        wanted = want, node_k.clone(), node_v.clone()
        node_k.fill_(torch.nan)
        node_v.fill_(torch.nan)
        got = fused.forward(decoder, token, position, attend, node_k, node_v)
        assert got is not None
        assert all(map(torch.equal, (got, node_k, node_v), wanted))
        rows.append(len(token))
        return got

    monkeypatch.setattr(Ops, "forward", compare)
    return rows


def draw(engine, **options):
    return csd.generate(
        engine, [5, 6, 7], num_samples=5, seed=1, max_new_tokens=40, ignore_eos=True, **options
    )


@pairs
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["laid out", "plain"])
def test_it_has_the_bits_of_its_operations(engine, both, family, dtype, plain):
    with engine(family, dtype, plain) as made:
        drawn = draw(made, budget=100)
        assert drawn.stats.nodes_proposed > 0
    # more rows than one pass over the weights has sums for
    assert min(both) < 16 and max(both) > MAX_ROWS


@slow
@pytest.mark.skipif("+avx512bf16" not in FEATURES, reason="the CPU does not have it")
def test_it_has_them_by_another_instruction(engine, both, monkeypatch):
    # heads of which attention multiplies pairs, too
    monkeypatch.setitem(EVEN, "head_dim", 32)
    for module in (fused, linear, attention):
        monkeypatch.setattr(module, "instruction", lambda dtype: "dot")
    with engine("qwen2", torch.bfloat16) as made:
        draw(made, budget=100)
    assert max(both) > MAX_ROWS


@few(1)
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("plain", [False, True], ids=["laid out", "plain"])
def test_it_has_them_in_several_threads(engine, both, threads, plain, monkeypatch):
    monkeypatch.setattr("csd.kernels.numba.threads.LEAST", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with engine("qwen2", torch.bfloat16, plain) as made:
            draw(made, budget=8)
    finally:
        torch.set_num_threads(before)
    assert both


# some projections of a fused product, another rank, and a layer without any
ADAPTERS = dict(
    r=4,
    lora_alpha=6,
    target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    rank_pattern={"v_proj": 40},
    layers_to_transform=[0],
)


def adapted(dtype, kind, **more):
    peft = pytest.importorskip("peft")
    model = checkpoints.build("qwen2", dtype=dtype, **EVEN)
    model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS | more))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape).mul(0.1).to(kind)
    return model


@pytest.mark.parametrize(
    ("dtype", "kind", "threads"),
    [
        (torch.float32, torch.float32, 1),
        pytest.param(torch.bfloat16, torch.float32, 1, marks=slow),
        pytest.param(torch.bfloat16, torch.bfloat16, 1, marks=slow),
        pytest.param(torch.bfloat16, torch.float32, 2, marks=slow),
    ],
    ids=str,
)
def test_adapters_have_them_too(engine, both, dtype, kind, threads, monkeypatch):
    monkeypatch.setattr("csd.kernels.numba.threads.LEAST", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with csd.Engine(adapted(dtype, kind), max_slots=5) as made:
        assert made.exact and made.decoder.adapters is not None
        draw(made, budget=100)
    assert min(both) < 16 and max(both) > MAX_ROWS


def test_adapters_that_the_loops_do_not_run_are_multiplied_by_the_operations(engine):
    model = adapted(torch.float32, torch.float32)
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    with csd.Engine(model, max_slots=5) as made:
        assert fused.Stacks.of(made.decoder, fused.PRODUCTS) is None
        assert len(draw(made).tokens) == 5


def test_what_stands_in_an_operation_s_place_is_called(engine, monkeypatch):
    """Another product, another norm, a drafter that reads a layer's input."""
    calls = []
    monkeypatch.setattr(fused, "_layers", lambda *args: calls.append(1))
    for change in ("product", "norm", "tap"):
        with engine("llama", torch.float32, exact=False) as made:
            if change == "product":
                product = made.decoder.linear
                made.decoder.linear = lambda *args, product=product: product(*args)
            elif change == "tap":
                made.decoder.taps = (1,)
            else:
                norm = made.ops.rms_norm
                other = lambda *args, norm=norm, **more: norm(*args, **more)  # noqa: E731
                made.ops = replace(made.ops, rms_norm=other)
            draw(made, budget=0)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "self_attn.v_proj.bias"])
def test_a_module_draws_from_what_its_weights_are_now(engine, dtype, name):
    module = checkpoints.build("qwen2", dtype=dtype, **EVEN)
    with csd.Engine(module, max_slots=5) as made:
        assert made.exact and fused._weights(made.decoder).kind is True
        before = draw(made, budget=8)
        with torch.no_grad():
            module.model.layers[1].get_parameter(name).data.add_(1)
        changed = draw(made, budget=8)
        assert draw(made, budget=0).tokens == changed.tokens != before.tokens
    with csd.Engine(module, max_slots=5) as other:
        assert draw(other, budget=8).logprobs == changed.logprobs


def test_weights_of_other_shapes_are_multiplied_by_the_operations(engine):
    with csd.Engine(checkpoints.build("llama"), max_slots=5) as made:
        assert fused._weights(made.decoder) is None
        assert len(draw(made).tokens) == 5
