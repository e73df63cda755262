"""Every key and tensor of a GGUF file is used or refused by name."""

from functools import cache

import pytest
import torch
from helpers.models import checkpoints, gguf_files

from csd.models.load import load
from csd.models.load.gguf.architectures import ARCHITECTURES
from csd.models.load.gguf.keys import NEUTRAL, NO_VALUE, USED, config_fields

constants = pytest.importorskip("gguf.constants")


def known_keys(scope=constants.Keys):
    """Keys below `<architecture>` that the package gguf knows of, of all architectures."""
    for value in vars(scope).values():
        if isinstance(value, type):
            yield from known_keys(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.").replace("{dense}", "dense_2")


@cache
def model_of(family):
    return gguf_files.build(family)


def keys_of(family, more=()):
    model = model_of(family)
    return {"general.architecture": family} | gguf_files.model_keys(model) | dict(more)


def fields(family, more=()):
    return config_fields(keys_of(family, more), checkpoints.VOCAB)


# linear scaling divides the rotary frequencies: its logits are compared in test_gguf_logits
SCALES = {"rope.scaling.factor", "rope.scale_linear"}


# keys from which an architecture's other fields follow
READ = {
    "phi3": {"attention.sliding_window"},
    "gemma3": {
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "final_logit_softcapping",
        "rope.freq_base_swa",
        "rope.scaling.factor",
    },
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_known_key_is_used_or_refused_by_name_or_without_a_value(family):
    known = set(known_keys())
    differs = ARCHITECTURES[family]
    used = USED | differs.keys
    assert len(known) > 100 and known.issuperset(NO_VALUE.union(used) | differs.neutral.keys())
    for key in sorted(known | NEUTRAL.keys() | {"some.new_key"}):
        more = {f"{family}.{key}": 7}
        if key == "attention.key_length":
            # these go together
            more |= {f"{family}.{k}": 7 for k in ("attention.value_length", "rope.dimension_count")}
            if family == "phi3":
                more[f"{family}.rope.dimension_count"] = 6
        if key in used:
            found = fields(family, more)
            rope = found["rope_parameters"]
            assert 7 in (found | rope | rope.get("full_attention", {})).values()
        elif key in READ.get(family, ()):
            # more than one field follows from it
            assert fields(family, more) != fields(family)
        elif key in NO_VALUE or key in SCALES:
            assert fields(family, more) == fields(family)
        else:
            with pytest.raises(ValueError, match=rf"{family}\.{key}=7"):
                fields(family, more)


@pytest.mark.parametrize(
    "key,value",
    [
        ("expert_count", 8),
        ("attention.sliding_window", 511),
        ("attention.key_length", 17),
        ("attention.value_length", 8),
        ("rope.dimension_count", 8),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.factor", float("nan")),
        ("attention.scale", 0.3),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("final_logit_softcapping", 30.0),
        ("attention.causal", False),
        ("vocab_size", 96),
        ("attention.head_count", [4, 2]),
        ("attention.head_count", 0),
        ("attention.head_count_kv", [2, 1]),
        ("feed_forward_length", "72"),
        ("rope.freq_base", float("inf")),
        ("pooling_type", 3),
        ("logit_scale", [1.0]),
        ("rope.dimension_sections", [8, 4, 4, 0]),
        ("classifier.output_labels", ["yes", "no"]),
    ],
    ids=str,
)
def test_refuse_a_key_that_the_decoder_does_not_compute(tmp_path, key, value):
    path = gguf_files.write(
        checkpoints.build("llama"), tmp_path / "tiny.gguf", keys={f"llama.{key}": value}
    )
    # 17 rows a head are refused where the sizes of values and of the embedding are 16
    named = "llama.attention.value_length=16" if key == "attention.key_length" else f"llama.{key}"
    with pytest.raises(ValueError, match=f"tiny.gguf.* cannot be loaded: .*its .*{named}"):
        load(path)


@pytest.mark.parametrize(
    "key,value",
    [
        ("general.architecture", "qwen2moe"),
        ("general.architecture", "mistral3"),
        ("general.architecture", "llama4"),
        ("general.architecture", "mistral"),
        ("general.type", "adapter"),
        ("split.count", 2),
        ("adapter.lora.alpha", 16.0),
        ("clip.has_vision_encoder", True),
        ("general.sampling.mirostat", 2),
        ("general.sampling.sequence", "tk"),
        ("general.sampling.xtc_probability", 0.5),
    ],
    ids=str,
)
def test_refuse_a_file_of_another_kind(tmp_path, key, value):
    path = gguf_files.write(checkpoints.build("llama"), tmp_path / "tiny.gguf", keys={key: value})
    with pytest.raises(ValueError, match=f"tiny.gguf.* cannot be loaded: .*its .*{key}={value!r}"):
        load(path)


@pytest.mark.parametrize(
    "key",
    sorted(USED.keys() - {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}),
)
def test_name_a_key_that_is_missing(key):
    keys = keys_of("qwen3")
    del keys[f"qwen3.{key}"]
    with pytest.raises(ValueError, match=f"it lacks the key qwen3.{key}"):
        config_fields(keys, checkpoints.VOCAB)


# name -> rows, of a width that the tensor may have elsewhere
BEYOND = {
    "llama": [
        "blk.0.attn_q.bias",
        "blk.1.attn_output.bias",
        "blk.0.ffn_up.bias",
        "blk.0.ffn_down.bias",
        "blk.0.attn_q_norm.weight",
        "blk.2.attn_q.weight",
        "blk.0.attn_q.scale",
        "output.bias",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
        "blk.0.rope_freqs.weight",
        "blk.0.attn_rot_embd.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_exps.weight",
        "output_norm.bias",
        "token_embd_norm.weight",
        "blk.0.attn_norm_2.weight",
        "blk.0.post_ffw_norm.weight",
        "cls.weight",
        "rope_freqs.bias",
        "v.patch_embd.weight",
        "nonesuch",
    ],
    "qwen2": [
        "rope_freqs.weight",
        "output.bias",
        "blk.0.attn_output.bias",
        "blk.0.attn_k_norm.weight",
        "blk.3.attn_q.bias",
    ],
    "qwen3": [
        "rope_freqs.weight",
        "blk.0.attn_q.bias",
        "cls.output.weight",
        "blk.1.attn_sub_norm.weight",
    ],
}


@pytest.mark.parametrize("family,name", [(f, n) for f, names in BEYOND.items() for n in names])
def test_refuse_a_tensor_that_the_decoder_does_not_compute_with(tmp_path, family, name):
    path = gguf_files.write(
        checkpoints.build(family), tmp_path / "tiny.gguf", tensors={name: torch.zeros(8)}
    )
    with pytest.raises(ValueError, match=f"tensors that .* does not use: {name}; supported are "):
        load(path)


def test_name_a_tensor_that_is_missing(tmp_path):
    model = checkpoints.build("qwen2")
    for name in gguf_files.tensors_of(model):
        path = gguf_files.write(model, tmp_path / "tiny.gguf", drop=[name])
        # without a head of its own, the embedding's is used
        if name != "output.weight":
            with pytest.raises(ValueError, match=f"it lacks the tensor.? {name}"):
                load(path)


@pytest.mark.parametrize(
    "name,shape,message",
    [
        ("blk.0.attn_v.weight", (16, 40), r"must have shape \(32, 40\) .*, got \(16, 40\)"),
        ("rope_freqs.weight", (16,), r"must have shape \(8,\) .*, got \(16,\)"),
        ("rope_freqs.weight", (8,), "must be positive"),
    ],
    ids=["value", "factors", "zeros"],
)
def test_refuse_a_tensor_of_other_numbers(tmp_path, name, shape, message):
    path = gguf_files.write(
        checkpoints.build("llama"), tmp_path / "tiny.gguf", tensors={name: torch.zeros(shape)}
    )
    with pytest.raises(ValueError, match=f"its {name} {message}"):
        load(path)
