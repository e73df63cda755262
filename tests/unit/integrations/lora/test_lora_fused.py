"""Adapters of peft in the fused decoder, and those that are left to the module."""

import pytest
import torch
from helpers.models.families import build
from helpers.models.lora_models import PROMPT, TOKENS, adapted, drawn, loop, lora, randomised

import csd
from csd.models.lora import tuner_layers

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("released")]


# what a LoRA may have, beside one rank for all projections
SHAPES = {
    "some projections": dict(target_modules=["q_proj", "down_proj", "up_proj"]),
    "some layers": dict(layers_to_transform=[1], target_modules=["k_proj", "o_proj"]),
    "other ranks": dict(rank_pattern={"k_proj": 3, "gate_proj": 40}, alpha_pattern={"v_proj": 5}),
    "the head": dict(target_modules=["o_proj", "lm_head"]),
    "rslora": dict(use_rslora=True),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_any_lora_of_projections_is_fused(case, family):
    torch.manual_seed(0)
    given = dict(r=4, lora_alpha=6, target_modules="all-linear") | SHAPES[case]
    model = randomised(
        peft.get_peft_model(build(family), peft.LoraConfig(**given), autocast_adapter_dtype=False)
    )
    assert drawn(model, decoder="fused") == loop(model)
    with model.disable_adapter():
        assert drawn(model, decoder="fused") == loop(model)


def test_two_adapters_at_once():
    model = adapted()
    model.base_model.set_adapter(["default", "other"])
    both = drawn(model, decoder="fused")
    assert both == loop(model)
    model.set_adapter("other")
    assert both != drawn(model, decoder="fused") == loop(model)
    for part in tuner_layers(model.modules()):
        part.scale_layer(2.0)
    assert drawn(model, decoder="fused") == loop(model)


def test_a_model_with_an_adapter_of_its_own():
    """transformers' add_adapter puts the layers into the model, with no PeftModel around it."""
    model = build("llama")
    model.add_adapter(lora())
    assert drawn(randomised(model), decoder="fused") == loop(model)


# what the fused decoder leaves to the module, and the property that it names
LEFT = {
    "dora": (dict(use_dora=True), "the adapter 'default' of .*q_proj is a Dora"),
    "bias": (dict(lora_bias=True), "q_proj has a bias"),
    "saved": (dict(modules_to_save=["lm_head"]), "lm_head is a ModulesToSaveWrapper of peft"),
    "embedding": (
        dict(target_modules=["embed_tokens", "q_proj"]),
        "embed_tokens is a Embedding of peft",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_fused_is_named_and_left_to_the_module(case):
    given, message = LEFT[case]
    base = build("qwen2" if case == "bias" else "llama")
    made = peft.LoraConfig(**dict(r=4, target_modules=["q_proj"]) | given)
    model = randomised(peft.get_peft_model(base, made, autocast_adapter_dtype=False))
    with pytest.raises(TypeError, match=message):
        csd.Engine(model, decoder="fused")
    with pytest.warns(UserWarning, match=message):
        assert csd.Engine(model).decoder.name == "module"


def test_a_replaced_forward_or_a_hook_within_a_lora_is_not_fused():
    model = adapted()
    part = model.base_model.model.model.layers[0].self_attn.q_proj
    handle = part.lora_A["default"].register_forward_hook(lambda *given: given[-1])
    with pytest.raises(TypeError, match=r"q_proj.lora_A.default has a forward hook"):
        csd.Engine(model, decoder="fused")
    handle.remove()
    part.forward = lambda x: x
    with pytest.raises(TypeError, match=r"q_proj has a replaced forward"):
        csd.Engine(model, decoder="fused")


def test_the_users_parameters_stay_theirs():
    model = adapted()
    before = {n: (id(w), w.data_ptr()) for n, w in model.named_parameters() if "lora_" in n}
    assert len(before) > 40
    drawn(model, decoder="fused")
    assert before == {n: (id(w), w.data_ptr()) for n, w in model.named_parameters() if "lora_" in n}


def test_a_step_of_an_optimiser_within_a_call_is_in_the_next_pass():
    model = adapted()
    engine = csd.Engine(model, decoder="fused", max_slots=1)
    want = loop(model)

    def trained(*_):
        with torch.no_grad():
            for part, weight in model.named_parameters():
                if "lora_B.default" in part:
                    weight.mul_(-1)

    out = engine.generate(
        PROMPT,
        num_samples=2,
        seed=4,
        max_new_tokens=TOKENS,
        budget=8,
        temperature=0.7,
        end_token_ids=[],
        callback=trained,
    )
    assert out[0].tokens[0] == want[0][0] and out[0].tokens != want[0]
    decoder = engine.decoder
    decoder.follow()
    pairs = [(m, m.lora_B["default"].weight) for m in tuner_layers(model.modules())]
    held = torch.cat([stack.b.flatten() for found in decoder.adapters.stacks for stack in found])
    for layer, weight in pairs:
        # each entry is in a stack, scaled
        assert torch.isin(weight * layer.scaling["default"], held).all()


def test_merged_adapters_that_are_turned_off_leave_the_weights():
    model = adapted()
    model.merge_adapter()
    with model.disable_adapter():
        got = drawn(model, decoder="fused")
        assert got == loop(model)
    assert got != drawn(model, decoder="fused") == loop(model)
