"""Text models of checkpoints that also read images: loaded whole, or refused with a remedy."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import csd
from csd.models.load import load

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
TEXT = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
VISION = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=14,
    patch_size=7,
)
WHOLE = {
    "gemma3": (dict(query_pre_attn_scalar=8), {}),
    "llama4": (
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size_mlp=48,
            attention_chunk_size=8,
        ),
        dict(
            pixel_shuffle_ratio=0.5,
            projector_input_dim=16,
            projector_output_dim=16,
            vision_output_dim=16,
        ),
    ),
    "mistral3": (dict(model_type="mistral"), dict(model_type="pixtral", head_dim=8)),
    "llava": (dict(model_type="llama"), dict(model_type="clip_vision_model")),
    "internvl": (dict(model_type="qwen2"), dict(image_size=[14, 14], patch_size=[7, 7])),
}


def whole(name, folder, text=None):
    """A model that also reads images, with random weights, and its checkpoint in `folder`."""
    more, vision = WHOLE.get(name, ({}, {}))
    config = transformers.AutoConfig.for_model(
        name, text_config=TEXT | more | (text or {}), vision_config=VISION | vision
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_model_is_loaded_from_the_folder_of_the_whole_one(name, tmp_path):
    model = whole(name, tmp_path)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    out = csd.score(str(tmp_path), PROMPT[:8], [PROMPT[8:]], dtype=torch.float32)
    rows = torch.arange(7, 19)
    assert torch.tensor(out.raw_logprobs[0]) == pytest.approx(want[rows, PROMPT[8:]], abs=1e-4)
    csd.release()


def test_a_whole_model_in_memory_is_refused_and_its_checkpoint_is_not(tmp_path):
    model = whole("gemma3", tmp_path / "first")
    with pytest.raises(ValueError, match="has a vision_config, but csd samples text") as refused:
        csd.Engine(model)
    assert "pass the folder or hub name of its checkpoint" in str(refused.value)
    assert "model.save_pretrained" in str(refused.value)
    model.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").decoder.name == "fused"


@pytest.mark.parametrize("change", ["missing", "renamed"])
def test_a_checkpoint_without_all_of_the_text_model_is_refused(change, tmp_path):
    whole("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if key.endswith("layers.1.mlp.up_proj.weight"))
    value = weights.pop(key)
    if change == "renamed":
        weights[key.replace("layers.1", "layers.9")] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path)
    if change == "renamed":
        weights[key] = value.clone()
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"does not use: model\.layers\.9\.mlp\.up_proj"):
            load(tmp_path)


def test_other_families_are_refused_by_name(tmp_path):
    config = transformers.AutoConfig.for_model("qwen3_vl")
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"text models of gemma3, internvl, .*, not this one"):
        csd.Engine(tmp_path)
