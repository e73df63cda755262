"""Every key and tensor of a GGUF file is used as llama.cpp uses it, or refused by name."""

import checkpoints
import pytest
import torch
from dense import Dense, assert_near, some_tokens, their_logits

from csd.models.load import load

gguf = pytest.importorskip("gguf")

HEAD = 16
EPSILON = float(torch.tensor(1e-6, dtype=torch.float32))


def write(path, family="llama", keys=(), tensors=(), without=(), seed=0, **changes):
    """A file of a tiny model, with more keys and tensors; returns the model in float64."""
    model = checkpoints.build(family, rms_norm_eps=EPSILON, seed=seed, **changes)
    c = model.config
    writer = gguf.GGUFWriter(path, family)
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    values = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }
    values = {k: v for k, v in values.items() if k not in without} | dict(keys)
    for key, value in values.items():
        whole = key.startswith(("tokenizer.", "general.", "split."))
        add(writer, key if whole else f"{family}.{key}", value)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, family.upper()), c.num_hidden_layers
    )
    for name, w in model.state_dict().items():
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = w.view(-1, 2, size // 2, c.hidden_size)
            w = halves.transpose(1, 2).reshape(w.shape)
        place, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(place)}.{kind}", w.numpy())
    for name, w in dict(tensors).items():
        writer.add_tensor(name, torch.as_tensor(w, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.double()


def add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def assert_same(path, model):
    loaded = load(path, dtype=torch.float64, device="cpu")
    tokens = some_tokens(40)
    assert_near(loaded.decoder, Dense(loaded.decoder).logits(tokens), their_logits(model, tokens))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_each_family_has_its_modules_logits(tmp_path, family):
    assert_same(tmp_path / "x.gguf", write(tmp_path / "x.gguf", family))


FACTORS = torch.linspace(1, 9, HEAD // 2)


@pytest.mark.parametrize(
    "keys, tensors, divided",
    [
        ({}, {"rope_freqs.weight": FACTORS}, FACTORS),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, 4.0),
        ({"rope.scaling.factor": 4.0}, {}, 4.0),
        ({"rope.scale_linear": 4.0}, {}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, 1.0),
        ({"rope.scaling.factor": 2.0}, {"rope_freqs.weight": FACTORS}, 2 * FACTORS),
    ],
    ids=["rope_freqs", "linear", "linear by default", "old linear", "none", "both"],
)
def test_rotary_factors_are_used(tmp_path, keys, tensors, divided):
    model = write(tmp_path / "x.gguf", keys=keys, tensors=tensors)
    plain = their_logits(model, some_tokens(40))
    rotary = model.model.rotary_emb
    # in single precision, as the module computes its own
    rotary.inv_freq = rotary.inv_freq.float() / divided
    same = torch.equal(their_logits(model, some_tokens(40)), plain)
    assert same == (keys.get("rope.scaling.type") == "none")
    assert_same(tmp_path / "x.gguf", model)


def test_heads_of_another_size_than_the_familys_default(tmp_path):
    # Qwen3's configuration has 128 where it is not given
    assert_same(tmp_path / "x.gguf", write(tmp_path / "x.gguf", "qwen3", head_dim=8))


KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.attn_factor": 1.5,
    "rope.dimension_count": 8,
    "attention.value_length": 8,
    "attention.scale": 0.5,
    "attention.causal": False,
    "attention.sliding_window": 16,
    "attention.clamp_kqv": 3.0,
    "attention.max_alibi_bias": 8.0,
    "attention.temperature_scale": 0.1,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.5,
    "residual_scale": 0.5,
    "embedding_scale": 12.0,
    "expert_count": 4,
    "nextn_predict_layers": 1,
    "use_parallel_residual": True,
    "swin_norm": True,
    "attention.head_count": [4, 2],
    "of_tomorrow": 7,
}


@pytest.mark.parametrize("key, value", KEYS.items(), ids=KEYS)
def test_a_key_that_is_not_computed_is_refused_by_name(tmp_path, key, value):
    write(tmp_path / "x.gguf", keys={key: value})
    with pytest.raises(ValueError, match=rf"x.gguf.* llama\.{key}"):
        load(tmp_path / "x.gguf", device="cpu")


NEUTRAL = {
    "attention.scale": HEAD**-0.5,
    "attention.causal": True,
    "attention.sliding_window": checkpoints.CONTEXT,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 128,
    "expert_count": 0,
    "logit_scale": 1.0,
    "pooling_type": 3,
}


def test_keys_without_a_value_for_the_computation_are_taken(tmp_path):
    assert_same(tmp_path / "x.gguf", write(tmp_path / "x.gguf", keys=NEUTRAL))


def test_every_key_of_the_format_is_used_or_refused(tmp_path):
    """As many unknown keys as the format has: with values of their own, none is passed over."""
    groups = [gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope]
    named = [v for g in groups for v in vars(g).values() if isinstance(v, str) and "{arch}." in v]
    from csd.models.gguf_facts import _NEUTRAL, _NO_VALUE, _USED

    known = {*_NEUTRAL, *_NO_VALUE, *_USED, "attention.scale", "attention.sliding_window"}
    rest = sorted({k.removeprefix("{arch}.") for k in named} - known)
    assert len(rest) > 30
    for key in rest[::6]:
        path = tmp_path / "x.gguf"
        write(path, keys={key: 3})
        if key.startswith("attention.sliding_window"):
            continue
        with pytest.raises(ValueError, match=r"has the key llama\."):
            load(path, device="cpu")


TENSORS = {
    "rope_factors_long.weight": [1.0],
    "blk.0.attn_q.bias": [0.1] * 64,
    "blk.1.attn_output.bias": [0.1] * 40,
    "blk.0.ffn_up.bias": [0.1] * 72,
    "blk.0.attn_sinks.weight": [0.1] * 4,
    "blk.0.attn_q_norm.weight": [0.1] * 16,
    "blk.0.ffn_gate_inp.weight": [0.1] * 40,
    "blk.2.attn_norm.weight": [0.1] * 40,
    "blk.0.attn_q.scale": [2.0],
}


@pytest.mark.parametrize("name, value", TENSORS.items(), ids=TENSORS)
def test_a_tensor_that_is_not_computed_is_refused_by_name(tmp_path, name, value):
    write(tmp_path / "x.gguf", tensors={name: value})
    with pytest.raises(ValueError, match=f"has the tensor {name}, which csd does not compute"):
        load(tmp_path / "x.gguf", device="cpu")


def test_factors_of_another_length_are_refused(tmp_path):
    write(tmp_path / "x.gguf", tensors={"rope_freqs.weight": [1.0] * 3})
    with pytest.raises(ValueError, match=r"rope_freqs.weight must have 8 values, got 3"):
        load(tmp_path / "x.gguf", device="cpu")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("general.type", "adapter", "general.type must be 'model', got 'adapter'"),
        ("split.count", 2, "split.count must be 0"),
    ],
)
def test_a_file_that_is_not_a_whole_model_is_refused(tmp_path, key, value, message):
    write(tmp_path / "x.gguf", keys={key: value})
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "x.gguf", device="cpu")


def test_tokens_that_end_a_turn_end_samples(tmp_path):
    ends = {"eos": 7, "eot": 9, "eom": 3}
    keys = {f"tokenizer.ggml.{name}_token_id": i for name, i in ends.items()}
    write(tmp_path / "x.gguf", keys=keys)
    loaded = load(tmp_path / "x.gguf", device="cpu")
    assert {7, 9, 3} <= set(loaded.generation_config.eos_token_id)
