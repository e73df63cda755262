"""Qwen3.5's layers in the fused decoder: an independent loop's tokens, and bits with `exact`."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.models.families import build
from helpers.oracles import oracle
from helpers.oracles.token_by_token import TokenByToken
from helpers.runs.exact_runs import assert_same_bits, run
from helpers.runs.hybrid_draws import TOKENS, drawn, prompt
from helpers.targets import few, slow

import csd
from csd.kernels.states import DeltaRule
from csd.models.fused.decoder import HybridDecoder
from csd.models.fused.fusable import refuse_patched
from csd.models.fused.fuse import fuse, is_fused
from csd.models.load import load

FAMILY = "qwen3_5_text"
BUDGETS = [(0, 16), pytest.param((4, 48), marks=slow)]
# sizes that are not in the table of families: one value head a key head, heads of odd sizes
OTHER = dict(
    layer_types=["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    num_hidden_layers=4,
    linear_num_value_heads=3,
    linear_num_key_heads=3,
    linear_key_head_dim=20,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    head_dim=16,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
)


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize(
    ("length", "changes"),
    [pytest.param(84, {}, marks=slow), (30, OTHER)],
    ids=["table", "other"],
)
def test_samples_are_those_of_the_recurrence_token_by_token(length, changes, budgets):
    model, given = build(FAMILY, **changes), prompt(length)
    alone = TokenByToken(copy.deepcopy(model))
    want = [
        oracle.generate(alone, given, seed=4, sample=i, max_new_tokens=TOKENS, temperature=0.7)
        for i in range(4)
    ]
    engine = csd.Engine(model, decoder="fused")
    assert type(engine.decoder) is HybridDecoder
    for budget in budgets:
        out = drawn(engine, given, budget)
        assert out.tokens == [tokens for tokens, *_ in want]
        for sample, (_, logprobs, *_) in zip(out, want, strict=True):
            # statistics of norms are float32, whatever the dtype
            assert sample.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert budget < 16 or out.stats.nodes_accepted > 4


def other_ancestor(ops):
    """A row takes the row before it for its parent's, where it has one."""

    def run(*tensors):
        path = tensors[-3].clone()
        depth = (path >= 0).sum(1, keepdim=True) - 1
        above = (depth - 1).clamp(min=0)
        row = path.gather(1, above)
        path.scatter_(1, above, torch.where(depth > 1, (row - 1).clamp(min=0), row))
        return ops.tree_delta_rule(*tensors[:-3], path, *tensors[-2:])

    return replace(ops, tree_delta_rule=run)


def no_decay(ops):
    def run(q, v, strength, key, decay, *others):
        return ops.tree_delta_rule(q, v, strength, key, torch.ones_like(decay), *others)

    return replace(ops, tree_delta_rule=run)


def moved_checkpoint(ops):
    """States are stored a token too early."""

    def run(state, key, update, decay, base, target):
        ops.advance_state(state, key.roll(1, 2), update.roll(1, 2), decay.roll(1, 2), base, target)

    return replace(ops, advance_state=run)


@few(1)
@pytest.mark.parametrize("change", [other_ancestor, no_decay, moved_checkpoint])
def test_what_is_wrong_of_a_state_changes_tokens(change):
    """The equality above means something."""
    engine = csd.Engine(build(FAMILY), decoder="fused")
    want = drawn(engine, prompt(40), 16)
    engine.ops = change(engine.ops)
    got = drawn(engine, prompt(40), 16)
    assert got.tokens != want.tokens
    assert got[0].logprobs != pytest.approx(want[0].logprobs, abs=1e-3)


# budget, samples, slots
RUNS, MORE_RUNS = [(48, 4, 2)], [(4, 4, 4), (16, 3, 1), ("auto", 3, 3)]


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE_RUNS, marks=slow)], ids=["one", "more"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_exact_gives_the_same_bits_in_every_run(dtype, runs):
    loaded = load(build(FAMILY, dtype, max_position_embeddings=256))
    loaded.module = None
    prompts = [prompt(n) for n in (2, 90)]

    def drawn(slots, count, budget):
        # chunks of any size are fixed, and these no multiple of 16
        return run(
            csd.Engine(loaded, max_slots=slots, prefill_chunk=40, exact=True),
            prompts,
            count,
            seed=3,
            max_new_tokens=40,
            temperature=0.7,
            ignore_eos=True,
            budget=budget,
        )

    plain = drawn(8, 4, 0)
    for budget, count, slots in runs:
        drafted = drawn(slots, count, budget)
        if budget != "auto":
            assert sum(out.stats.nodes_accepted for out in drafted[0]) > 0
        assert_same_bits(drafted, plain)


def test_bits_differ_where_states_move_on_as_soon_as_they_can(monkeypatch):
    loaded = load(build(FAMILY, torch.float32))

    def some(budget):
        engine = csd.Engine(loaded, exact=True)
        options = dict(seed=3, max_new_tokens=40, temperature=0.7, ignore_eos=True)
        return run(engine, [prompt(20)], 4, budget=budget, **options)

    monkeypatch.setattr("csd.kernels.states.checkpoint", lambda n: (n - 1).clamp(min=0) // 16 * 16)
    with pytest.raises(AssertionError):
        assert_same_bits(some(16), some(0))


def test_the_modules_tokens_in_float32():
    model, given = build(FAMILY, torch.float32), prompt(84)
    want = drawn(csd.Engine(model, decoder="module"), given, 16)
    out = drawn(csd.Engine(model, decoder="fused"), given, 16)
    assert sum(a == b for a, b in zip(out.tokens, want.tokens, strict=True)) >= 3


def test_weights_stay_the_modules():
    model = build(FAMILY, torch.float32)
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    decoder = fuse(model)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, want)
    assert is_fused(model, decoder) and is_fused(model, fuse(model))
    engine = csd.Engine(model)
    before = drawn(engine, prompt(9), 4).tokens
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.add_(2)
    assert drawn(engine, prompt(9), 4).tokens != before
    mixer = model.model.layers[0].linear_attn
    mixer.dt_bias = torch.nn.Parameter(mixer.dt_bias.clone())
    assert not is_fused(model, decoder)


def test_what_a_module_changes_is_refused_by_name(monkeypatch):
    model = build(FAMILY, torch.float32)
    config = fuse(model).config
    model.model.layers[0].linear_attn.norm.variance_epsilon = 1e-3
    with pytest.raises(ValueError, match=r"linear_attn\.norm\.variance_epsilon must be"):
        refuse_patched(model, config)
    model = build(FAMILY, torch.float32)
    monkeypatch.setattr(
        "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule", prompt
    )
    with pytest.raises(TypeError, match="torch_chunk_gated_delta_rule is prompt"):
        fuse(model)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="'lightning' are not supported"):
        fuse(build(FAMILY, torch.float32)).config.from_transformers(
            replace_types(model.config, ["lightning", "full_attention", "linear_attention"])
        )


def replace_types(config, kinds):
    made = copy.deepcopy(config)
    object.__setattr__(made, "layer_types", kinds)
    return made


def test_a_draft_model_with_states_is_refused_by_name():
    target = csd.Engine(
        build("qwen3", torch.float32), drafter=csd.DraftModel(build(FAMILY, torch.float32))
    )
    with pytest.raises(ValueError, match="a draft model must have no layers with a state"):
        drawn(target, prompt(8), 4)


def test_padding_and_a_prompt_of_one_token():
    engine = csd.Engine(build(FAMILY, torch.float32), static=True, kernels="reference")
    reference = csd.Engine(build(FAMILY, torch.float32), kernels="reference")
    want = drawn(reference, [5], 4, samples=2, tokens=12)
    assert drawn(engine, [5], 4, samples=2, tokens=12).tokens == want.tokens


def test_delta_rules_keys_have_length_one():
    q = torch.randn(3, 2, 20)
    rule = DeltaRule(q, 3 * q, q, q[..., 0], q[..., 0], normalize=True)
    from csd.kernels.ops import reference

    _, key, _ = rule.inputs(reference(), torch.float32)
    torch.testing.assert_close(key.norm(dim=-1), torch.ones(3, 2), rtol=1e-5, atol=0)
