"""Families whose differences from Llama are data of the fused decoder."""

import copy
from dataclasses import replace

import oracle
import pytest
import torch
from families import build, convert
from host_reads import NoHostReads

import csd
from csd.models.fuse import is_fused
from csd.models.load import load

FUSED = ("smollm3", "granite", "qwen3_moe", "phi3", "olmo2")
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
TOKENS = 8
SAMPLING = (dict(temperature=0.7, top_p=0.95), dict(temperature=0))


def plain(model, **params):
    return [
        oracle.generate(model, PROMPT, seed=4, sample=i, max_new_tokens=TOKENS, **params)
        for i in range(2)
    ]


def drawn(engine, budget=16, **params):
    return engine.generate(
        PROMPT, num_samples=2, seed=4, max_new_tokens=TOKENS, budget=budget, end_token_ids=[],
        **params,
    )  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_its_tokens_are_plain_samplings(name):
    model = build(name)
    engine = csd.Engine(model, prefill_chunk=8)
    assert engine.decoder.name == "fused"
    for params in SAMPLING:
        want = plain(model, **params)
        for budget in (0, 16):
            out = drawn(engine, budget, **params)
            assert out.tokens == [tokens for tokens, *_ in want]
            for sample, (_, logprobs, raw, _) in zip(out, want, strict=True):
                assert sample.logprobs == pytest.approx(logprobs, abs=2e-5)
                assert sample.raw_logprobs == pytest.approx(raw, abs=2e-5)


# what a decoder without the property would compute
LEFT_OUT = {
    "no rotary in all layers": ("smollm3", dict(rotated=None)),
    "another scale": ("granite", dict(scale=None)),
    "embeddings as they are": ("granite", dict(embedding_scale=1.0)),
    "the residual as it is": ("granite", dict(residual_scale=1.0)),
    "logits as they are": ("granite", dict(logit_divisor=1.0)),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_tokens_depend_on_the_property(case):
    name, change = LEFT_OUT[case]
    model = build(name)
    loaded = load(model)
    loaded.decoder.config = loaded.config = replace(loaded.config, **change)
    loaded.module = None
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    assert drawn(csd.Engine(loaded), 0, temperature=0.7).tokens != want


@pytest.mark.parametrize("change", [dict(per_token=1), dict(sum_to_one=False)], ids=str)
def test_tokens_depend_on_the_experts(change):
    model = build("qwen3_moe")
    engine = csd.Engine(model)
    for layer in engine.decoder.layers:
        layer.experts = replace(layer.experts, **change)
    want = [tokens for tokens, *_ in plain(model, temperature=0.7)]
    assert drawn(engine, 0, temperature=0.7).tokens != want


@pytest.mark.parametrize("name", FUSED)
def test_log_probabilities_in_bfloat16(name):
    """No farther from a float64 run than twice the module's own forward, over the same text."""
    model = build(name, torch.bfloat16)
    out = drawn(csd.Engine(model), 8, temperature=1.0)
    wide = convert(copy.deepcopy(model), torch.float64)
    off = {"csd": [], "own": []}
    for sample in out:
        own, exact = (forward(m, sample.tokens) for m in (model, wide))
        off["csd"].append((torch.tensor(sample.logprobs, dtype=torch.float64) - exact).abs())
        off["own"].append((own - exact).abs())
    # another expert is no rounding of its own
    middle = {side: torch.cat(found).median() for side, found in off.items()}
    assert middle["csd"] <= 2 * middle["own"]


@torch.no_grad()
def forward(model, tokens):
    logits = model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_an_exact_engine_has_the_same_bits_whatever_is_drafted(name, dtype):
    engine = csd.Engine(build(name, dtype), exact=True)
    found = [drawn(engine, budget, temperature=0.7) for budget in (0, 4, 16)]
    assert found[0].logprobs == found[1].logprobs == found[2].logprobs
    assert found[2].stats.nodes_proposed > 0


@pytest.mark.parametrize("name", FUSED)
def test_any_replaced_parameter_is_noticed(name):
    model = build(name)
    loaded = load(model)
    for part, weight in model.named_parameters():
        assert is_fused(model, loaded.decoder)
        weight.data = weight.data.clone()
        assert loaded.refresh(), part
        assert not loaded.refresh(), part


# a value that a module computes with, changed behind its config
CHANGED = {
    "rope": ("smollm3", lambda m: setattr(m.model.layers[1].self_attn, "use_rope", True)),
    "scaling": ("granite", lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.5)),
    "residual_multiplier": (
        "granite", lambda m: setattr(m.model.layers[2], "residual_multiplier", 0.9)
    ),
    "embedding_multiplier": ("granite", lambda m: setattr(m.model, "embedding_multiplier", 2.0)),
    "top_k": ("qwen3_moe", lambda m: setattr(m.model.layers[0].mlp.gate, "top_k", 1)),
    "norm_topk_prob": (
        "qwen3_moe", lambda m: setattr(m.model.layers[0].mlp.gate, "norm_topk_prob", False)
    ),
    "post_feedforward_layernorm": (
        "olmo2",
        lambda m: setattr(m.model.layers[0].post_feedforward_layernorm, "variance_epsilon", 1.0),
    ),
    "experts.act_fn": (
        "qwen3_moe",
        lambda m: setattr(m.model.layers[0].mlp.experts, "act_fn", torch.nn.ReLU()),
    ),
    "activation_fn": (
        "phi3", lambda m: setattr(m.model.layers[0].mlp, "activation_fn", torch.nn.ReLU())
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_module_is_not_fused(case):
    name, change = CHANGED[case]
    model = build(name)
    change(model)
    with pytest.raises((TypeError, ValueError), match=case):
        load(model)


# what a family may have that is left to its module
LEFT = {
    "phi3": (dict(sliding_window=9), "sliding_window=9 is in use"),
    "smollm3": (dict(attention_bias=True), "attention_bias=True is not supported"),
    "qwen3_moe": (dict(mlp_only_layers=[1]), "layers without experts"),
    "granite": (dict(mlp_bias=True), "mlp_bias=True is not supported"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_module_is_named(name):
    changes, message = LEFT[name]
    with pytest.raises(ValueError, match=message):
        load(build(name, **changes))


def test_experts_of_a_captured_step_are_those_of_the_loop():
    """The grouped product, which a GPU runs, beside the products of a CPU one by one."""
    torch.manual_seed(0)
    experts = load(build("qwen3_moe", torch.bfloat16)).decoder.layers[0].experts
    x = torch.randn(13, 32, dtype=torch.bfloat16)
    ops, linear = csd.Engine(build("llama", torch.bfloat16)).ops, torch.nn.functional.linear
    chosen = experts.routed(linear(x, experts.router))[1]
    one, grouped = (
        run(linear, ops.swiglu, x, chosen)
        for run in (experts._one_by_one, experts._grouped)
    )  # fmt: skip
    exact = replace(experts, **{
        name: getattr(experts, name).double() for name in ("router", "gate_up", "down")
    })._one_by_one(linear, wide_swiglu, x.double(), chosen)  # fmt: skip
    assert (grouped - exact).abs().max() <= 2 * (one - exact).abs().max()
    with NoHostReads():
        experts._grouped(linear, ops.swiglu, x, experts.routed(linear(x, experts.router))[1])
    # another order of the experts is another result
    other = experts._grouped(linear, ops.swiglu, x, chosen.flip(-1))
    assert not torch.equal(other, grouped)


def wide_swiglu(x):
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
