"""Adapters of peft: csd draws from the module as it is, unmerged, whatever is active."""

import copy

import pytest
import torch
import transformers
from helpers.examples_main import main_of
from helpers.models.families import build, convert
from helpers.models.lora_models import PROMPT, TOKENS, adapted, drawn, loop, lora, randomised
from torch.overrides import TorchFunctionMode

import csd
from csd.models.load import config_of

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("released")]


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


@pytest.mark.parametrize("kind", ["dora", "ia3", "vera"])
def test_other_adapters_of_weights(kind):
    made = {
        "dora": lambda: lora(use_dora=True),
        "ia3": lambda: peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    }[kind]()
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
            model,
            PROMPT,
            num_samples=4,
            seed=0,
            max_new_tokens=TOKENS,
            temperature=1.0,
            end_token_ids=[],
            budget=8,
        )
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


class WideSoftmax(TorchFunctionMode):
    """Softmax in float64 where transformers' eager attention asks for float32, in any dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.softmax:
            kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **kwargs)


@pytest.mark.parametrize("decoder", ["fused", "module"])
def test_log_probabilities_in_float64_are_without_rounding_to_float32(decoder):
    """A softcap needs eager attention, whose softmax rounds; 12 random layers amplify that."""
    layers = ["sliding_attention", "full_attention"] * 6
    base = build("gemma2", num_hidden_layers=12, layer_types=layers)
    model = peft.get_peft_model(base, lora(), autocast_adapter_dtype=False)
    torch.manual_seed(0)
    engine = csd.Engine(randomised(model, spread=1.0), decoder=decoder)
    out = engine.generate(
        PROMPT,
        num_samples=3,
        seed=4,
        max_new_tokens=24,
        temperature=1.0,
        end_token_ids=[],
        budget=8,
    )
    again = csd.logprobs(engine, PROMPT, out.tokens).logprobs
    own_error = 0.0
    for sample, given in zip(out, again, strict=True):
        got = torch.tensor(sample.logprobs, dtype=torch.float64)
        with WideSoftmax():
            want = forward_logprobs(model, sample.tokens)
        assert max((got - want).abs().max(), (given - want).abs().max()) <= 1e-9
        own_error = max(own_error, (forward_logprobs(model, sample.tokens) - want).abs().max())
    assert own_error > 1e-4


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must name its base model"),
        ("[", "is not the config of an adapter"),
        ('{"base_model_name_or_path": "nowhere/at-all"}', "nowhere/at-all"),
    ],
)
def test_an_adapter_without_its_base_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        csd.Engine(tmp_path)


def test_hf_generate_draws_from_the_adapter():
    model = adapted()
    model.generation_config.pad_token_id = 0
    out = model.generate(
        input_ids=torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        seed=4,
        custom_generate=csd.hf_generate,
        do_sample=True,
        temperature=0.7,
        top_k=0,
        num_return_sequences=2,
        max_new_tokens=TOKENS,
        budget=8,
    )
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

    trainer = main_of("grpo/grpo_lora.py")(steps=8, tokens=10, rollout=Watched())
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    # of about 0.1 at random
    assert sum(rewards[-2:]) / 2 > 2 * sum(rewards[:2]) / 2
    assert max(drawn) < 1e-5
    base = {n: w for n, w in trainer.model.named_parameters() if not w.requires_grad}
    fresh = dict(main_of("grpo/grpo_lora.py").__globals__["toy_llama"]()[0].named_parameters())
    kept = [n for n in base if n.endswith("q_proj.base_layer.weight")]
    for name in kept:
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(base[name], fresh[plain])
    assert kept
