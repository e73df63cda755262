"""Adapters of peft: csd draws from the module as it is, unmerged, whatever is active."""

import copy

import oracle
import pytest
import torch
import transformers
from examples_main import main_of
from families import build, convert

import csd
from csd.models.adapters import tuner_layers
from csd.models.load import config_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
TOKENS = 8


@pytest.fixture(autouse=True)
def released():
    yield
    csd.release()


def lora(**more):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **more)


def adapted(name="llama", dtype=torch.float64, spread=0.3, **more):
    """A model with two adapters, whose weights are random."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build(name, dtype), lora(**more), autocast_adapter_dtype=False)
    model.add_adapter("other", lora())
    for part, weight in model.named_parameters():
        if "lora_" in part:
            torch.nn.init.normal_(weight, std=spread)
    return convert(model, dtype).eval()


def drawn(model, budget=8, **more):
    out = csd.generate(
        model, PROMPT, num_samples=2, seed=4, max_new_tokens=TOKENS, budget=budget,
        temperature=0.7, end_token_ids=[], **more,
    )  # fmt: skip
    return out.tokens


@torch.no_grad()
def loop(model):
    return [
        oracle.generate(model, PROMPT, seed=4, sample=i, max_new_tokens=TOKENS, temperature=0.7)[0]
        for i in range(2)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "qwen3_5_text"])
def test_tokens_are_those_of_the_adapter_that_is_active(name):
    model = adapted(name)
    seen = []

    def check():
        want = loop(model)
        assert drawn(model, 0) == drawn(model) == want
        seen.append(want)

    check()
    model.set_adapter("other")
    check()
    with model.disable_adapter():
        check()
        assert seen[-1] == loop(model.get_base_model())
    model.set_adapter("default")
    assert drawn(model) == seen[0]
    for weight in model.parameters():
        if weight.requires_grad:
            # as an optimiser does
            weight.data.add_(0.1)
    check()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    assert len({str(tokens) for tokens in seen[:4]}) == 4


def test_an_adapter_that_is_added_later_is_found():
    model = adapted()
    first = drawn(model)
    model.add_adapter("third", lora())
    for part, weight in model.named_parameters():
        if "third" in part:
            torch.nn.init.normal_(weight, std=0.3)
    convert(model, torch.float64)
    model.set_adapter("third")
    assert drawn(model) == loop(model) != first


def test_training_mode_with_dropout_draws_as_in_evaluation():
    model = adapted(lora_dropout=0.5)
    want = loop(model)
    model.train()
    assert drawn(model) == want
    assert all(m.training for m in model.modules())


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
    model = randomised(peft.get_peft_model(
        build(family), peft.LoraConfig(**given), autocast_adapter_dtype=False
    ))  # fmt: skip
    assert drawn(model, decoder="fused") == loop(model)
    with model.disable_adapter():
        assert drawn(model, decoder="fused") == loop(model)


def randomised(model, dtype=torch.float64):
    for part, weight in model.named_parameters():
        if "lora_" in part:
            torch.nn.init.normal_(weight, std=0.3)
    return convert(model, dtype).eval()


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
        dict(target_modules=["embed_tokens", "q_proj"]), "embed_tokens is a Embedding of peft"
    ),
}  # fmt: skip


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
    with pytest.raises(TypeError, match=r"q_proj has a forward of its own"):
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

    out = engine.generate(PROMPT, num_samples=2, seed=4, max_new_tokens=TOKENS, budget=8,
                          temperature=0.7, end_token_ids=[], callback=trained)  # fmt: skip
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


@pytest.mark.parametrize("kind", ["dora", "ia3", "vera"])
def test_other_adapters_of_weights(kind):
    made = {
        "dora": lambda: lora(use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"],
                                      feedforward_modules=["down_proj"]),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    }[kind]()  # fmt: skip
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama"), made, autocast_adapter_dtype=False)
    for part, weight in model.named_parameters():
        if weight.requires_grad and "magnitude" not in part:
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    convert(model, torch.float64).eval()
    assert drawn(model) == loop(model)


def test_log_probabilities_are_the_trainers_own():
    for dtype in (torch.float32, torch.bfloat16, "mixed"):
        low = dtype != torch.float32
        model = adapted("llama", torch.bfloat16 if low else dtype, spread=0.05)
        if dtype == "mixed":
            # adapters in float32, as peft makes them
            for part, weight in model.named_parameters():
                weight.data = weight.data.float() if "lora_" in part else weight.data
        out = csd.generate(
            model, PROMPT, num_samples=4, seed=0, max_new_tokens=TOKENS, temperature=1.0,
            end_token_ids=[], budget=8,
        )  # fmt: skip
        assert out.stats.decoder == "fused"
        wide = convert(copy.deepcopy(model), torch.float64)
        off = {"csd": 0.0, "own": 0.0}
        for sample in out:
            own, exact = (forward_logprobs(m, sample.tokens) for m in (model, wide))
            got = torch.tensor(sample.logprobs, dtype=torch.float64)
            off["csd"] = max(off["csd"], float((got - exact).abs().max()))
            off["own"] = max(off["own"], float((own - exact).abs().max()))
            if not low:
                assert (got - own).abs().max() <= 1e-5
        if low:
            # rounding alone, of other sums
            assert off["csd"] <= 2 * off["own"]


@torch.no_grad()
def forward_logprobs(model, tokens):
    logits = model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens]


def switch_to(model, change):
    """A callback that calls change(model) at its first call."""
    done = []

    def callback(*_):
        if not done:
            done.append(change(model))

    return callback


@pytest.mark.parametrize("change", [
    lambda model: model.set_adapter("other"),
    lambda model: model.base_model.disable_adapter_layers(),
], ids=["other", "off"])  # fmt: skip
def test_a_call_ends_with_the_adapters_that_it_began_with(change):
    model = adapted()
    before = loop(model)
    assert drawn(model, callback=switch_to(model, change)) == before
    after = loop(model)
    assert after != before and drawn(model) == after


@pytest.mark.parametrize("change", [
    lambda model: model.merge_adapter(), lambda model: model.delete_adapter("default"),
], ids=["merged", "deleted"])  # fmt: skip
def test_adapters_that_are_gone_are_an_error(change):
    model = adapted()
    with pytest.raises(RuntimeError, match="merged or removed while samples were drawn"):
        drawn(model, callback=switch_to(model, change))
    assert drawn(model) == loop(model)


def test_a_switch_within_a_pass_has_it_run_once_more():
    from csd.models.adapters import Adapters

    model = adapted()
    adapters, seen = Adapters(model.modules()), []

    def once():
        seen.append(model.active_adapters[0])
        if len(seen) == 1:
            model.set_adapter("other")
        return model.base_model.model.model.layers[0].self_attn.q_proj.active_adapters[0]

    assert adapters.run(once) == "default" and len(seen) == 2
    assert adapters.now() != adapters.state


def test_requests_in_flight_end_with_the_adapters_that_they_began_with():
    """Requests that come after a switch wait, and are drawn with the new adapters."""
    import threading

    model = adapted()
    of_default = loop(model)
    model.set_adapter("other")
    of_other = loop(model)
    model.set_adapter("default")
    options = dict(seed=4, temperature=0.7, end_token_ids=[])
    with csd.AsyncEngine(model, budget=8, max_slots=6) as service:
        began, switched = threading.Event(), threading.Event()

        def hold(prefix):
            began.set()
            assert switched.wait(60)
            return False

        # its sample 0 ends first, and the others with it
        long = service.submit(PROMPT, num_samples=2, max_new_tokens=TOKENS, until=hold, **options)
        short = service.submit(PROMPT, num_samples=1, max_new_tokens=2, until=hold, **options)
        assert began.wait(60)
        model.set_adapter("other")
        later = service.submit(PROMPT, num_samples=2, max_new_tokens=TOKENS, **options)
        switched.set()
        assert short.result(60).tokens == [of_default[0][:2]]
        assert long.result(60).tokens == of_default
        assert later.result(60).tokens == of_other != of_default
        assert [h.weights for h in (long, short, later)] == [0, 0, 1]
        assert len({long.fingerprint, short.fingerprint, later.fingerprint}) == 2
    assert drawn(model) == of_other


def test_adapters_that_are_no_weights_are_refused():
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for made in (prefix, prompt):
        model = peft.get_peft_model(build("llama", torch.float32), made)
        with pytest.raises(ValueError, match="prompt learning"):
            csd.generate(model, PROMPT, max_new_tokens=2)


def test_a_folder_with_an_adapter_alone_is_drawn_from_its_base(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    build("llama", torch.float32).save_pretrained(base)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(plain, lora(init_lora_weights=False)).save_pretrained(folder)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    engine = csd.Engine(folder, dtype=torch.float32)
    assert engine.decoder.name == "fused" and engine.decoder.adapters is not None
    given = dict(num_samples=2, seed=4, max_new_tokens=TOKENS, temperature=0.7, end_token_ids=[])
    out = engine.generate(PROMPT, budget=8, **given)
    assert out.tokens == engine.generate(PROMPT, budget=0, **given).tokens
    assert out.tokens == csd.generate(model, PROMPT, budget=8, **given).tokens
    assert out.tokens != csd.generate(str(base), PROMPT, dtype=torch.float32, **given).tokens
    assert config_of(str(folder)).vocab == 61


@pytest.mark.parametrize(("content", "message"), [
    ("{}", "must name its base model"), ("[", "is not an adapter's config"),
    ('{"base_model_name_or_path": "nowhere/at-all"}', "nowhere/at-all"),
])  # fmt: skip
def test_an_adapter_without_its_base_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        csd.Engine(tmp_path)


def test_hf_generate_draws_from_the_adapter():
    model = adapted()
    model.generation_config.pad_token_id = 0
    out = model.generate(
        input_ids=torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), seed=4,
        custom_generate=csd.hf_generate, do_sample=True, temperature=0.7, top_k=0,
        num_return_sequences=2, max_new_tokens=TOKENS, budget=8,
    )  # fmt: skip
    assert out[:, len(PROMPT) :].tolist() == loop(model)


def test_grpo_trains_an_adapter_whose_reward_rises():
    pytest.importorskip("trl")
    from csd.engine.generate import engine_for
    from csd.integrations.trl import Rollout

    drawn = []

    class Watched(Rollout):
        def __call__(self, prompts, trainer):
            out = super().__call__(prompts, trainer)
            model = trainer.accelerator.unwrap_model(trainer.model)
            assert engine_for(model).decoder.name == "fused"
            ids, new = out["prompt_ids"][0], out["completion_ids"][0]
            flags = [m.training for m in model.modules()]
            model.eval()
            with torch.no_grad():
                logits = model(torch.tensor([ids + new]), use_cache=False).logits[0]
            for module, flag in zip(model.modules(), flags, strict=True):
                module.training = flag
            own = logits[len(ids) - 1 : -1].log_softmax(-1)[torch.arange(len(new)), new]
            drawn.append(float((own - torch.tensor(out["logprobs"][0])).abs().max()))
            return out

    trainer = main_of("grpo_lora.py")(steps=8, tokens=10, rollout=Watched())
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    # of about 0.1 at random
    assert sum(rewards[-2:]) / 2 > 2 * sum(rewards[:2]) / 2
    assert max(drawn) < 1e-5
    base = {n: w for n, w in trainer.model.named_parameters() if not w.requires_grad}
    fresh = dict(main_of("grpo_lora.py").__globals__["toy_llama"]()[0].named_parameters())
    kept = [n for n in base if n.endswith("q_proj.base_layer.weight")]
    for name in kept:
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(base[name], fresh[plain])
    assert kept
