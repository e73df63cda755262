"""The decoder's logits against those of transformers, and what it takes to load a model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import checkpoints
import pytest
import torch
import transformers
from torch import nn

import csd
from csd.kernels.rms_norm import rms_norm_ref
from csd.kernels.rotary import rotary_ref
from csd.kernels.swiglu import swiglu_ref
from csd.models.config import ModelConfig
from csd.models.fuse import fuse
from csd.models.load import load
from csd.models.shapes import SHAPES, random_model

OPS = SimpleNamespace(rms_norm=rms_norm_ref, rotary=rotary_ref, swiglu=swiglu_ref)
WRITTEN = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
FAMILY = pytest.mark.parametrize("family", checkpoints.FAMILIES)


class Dense:
    """A sequence in plain causal attention: the keys and values of all of it, in one tensor."""

    def __init__(self, decoder):
        self.decoder, self.length = decoder, 0
        c = decoder.config
        self.kv = torch.empty(2, c.layers, 0, c.kv_heads, c.head_dim, dtype=decoder.norm.dtype)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        c, n = self.decoder.config, tokens.shape[0]
        position = torch.arange(self.length, self.length + n, dtype=torch.int32)
        self.kv = torch.cat([self.kv, self.kv.new_empty(2, c.layers, n, *self.kv.shape[3:])], 2)
        new = self.kv[:, :, self.length :]

        def attend(layer, q):
            # [H, tokens, D]
            k, v = self.kv[:, layer].repeat_interleave(c.heads // c.kv_heads, 2).transpose(1, 2)
            wide = torch.promote_types(q.dtype, torch.float32)
            score = q.transpose(0, 1).to(wide) @ k.mT.to(wide) * c.head_dim**-0.5
            later = torch.arange(k.shape[1]) > position[:, None]
            p = score.masked_fill(later, float("-inf")).softmax(-1)
            return (p @ v.to(wide)).transpose(0, 1).to(q.dtype)

        self.length += n
        return self.decoder.forward(tokens.int(), position, attend, new[0], new[1], OPS)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(self.hidden(tokens))


def some_tokens(count: int, vocab: int = checkpoints.VOCAB) -> torch.Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(3))


def their_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def assert_same_logits(decoder, tokens, want, prompt: int, tolerance: float) -> None:
    """At the prefill of `prompt` tokens, then at each step of one token."""
    ours = Dense(decoder)
    got = [ours.logits(tokens[:prompt])]
    got += [ours.logits(tokens[i : i + 1]) for i in range(prompt, len(tokens))]
    error = (torch.cat(got) - want).abs().amax(1)
    assert error.max() <= tolerance, error.tolist()


def transformers_model(path, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


@WRITTEN
@FAMILY
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float64, 1e-9)],
    ids=["float32", "float64"],
)
def test_logits(checkpoint, family, tied, dtype, tolerance):
    path = checkpoint(family, tied=tied)
    model = transformers_model(path, dtype)
    tokens = some_tokens(50)
    want = their_logits(model, tokens)
    assert want.std() > 1
    loaded = load(path, dtype=dtype)
    assert loaded.dtype == dtype and loaded.config.tied == tied
    assert_same_logits(loaded.decoder, tokens, want, 37, tolerance)
    # the same from the module itself, whose own logits stay as they are
    assert_same_logits(load(model).decoder, tokens, want, 37, tolerance)
    assert torch.equal(their_logits(model, tokens), want)


@FAMILY
def test_logits_in_bfloat16(checkpoint, family):
    """No further from the exact logits than transformers is in the same dtype."""
    path = checkpoint(family, dtype=torch.bfloat16)
    tokens = some_tokens(40)
    exact = their_logits(transformers_model(path, torch.float64), tokens)
    theirs = their_logits(transformers_model(path, torch.bfloat16), tokens)
    ours = Dense(load(path, dtype=torch.bfloat16).decoder).logits(tokens)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_logits_of_a_real_model(smollm2_module):
    tokens = some_tokens(45, smollm2_module.config.vocab_size)
    want = their_logits(smollm2_module, tokens)
    assert_same_logits(load(smollm2_module).decoder, tokens, want, 40, 1e-4)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_rows_at_any_position(checkpoint, family):
    """Rows need not follow one another, and a row of padding changes no other row."""
    decoder = load(checkpoint(family), dtype=torch.float64).decoder
    c = decoder.config
    tokens, order = some_tokens(12), torch.randperm(12)
    seen = Dense(decoder)
    want = seen.logits(tokens)
    node_k, node_v = torch.zeros_like(seen.kv).new_zeros(2, c.layers, 14, c.kv_heads, c.head_dim)
    token = torch.cat([tokens[order], torch.tensor([-1, -1])]).int()
    position = torch.cat([order, torch.tensor([0, 0])]).int()

    def attend(layer, q):
        k, v = (x[layer].repeat_interleave(c.heads // c.kv_heads, 1) for x in (node_k, node_v))
        score = torch.einsum("rhd,chd->hrc", q, k) * c.head_dim**-0.5
        later = (position > position[:, None]) | (token == -1)
        return torch.einsum("hrc,chd->rhd", score.masked_fill(later, float("-inf")).softmax(-1), v)

    got = decoder.logits(decoder.forward(token, position, attend, node_k, node_v, OPS))
    assert got.shape == (14, c.vocab)
    assert (got[:12] - want[order]).abs().max() < 1e-12
    # keys and values are those of the sequence in order, at every layer
    assert (node_k[:, :12] - seen.kv[0][:, order]).abs().max() < 1e-12
    assert (node_v[:, :12] - seen.kv[1][:, order]).abs().max() < 1e-12


# Loading


def test_load_a_sharded_folder(tmp_path, checkpoint):
    path = checkpoints.make("qwen2", tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = some_tokens(20)
    whole = Dense(load(checkpoint("qwen2")).decoder).logits(tokens)
    assert torch.equal(Dense(load(path).decoder).logits(tokens), whole)


def test_load_a_path_object(checkpoint, tmp_path):
    path = checkpoints.make("llama", tmp_path, generation=dict(do_sample=True, temperature=0.25))
    loaded = load(tmp_path)
    assert loaded.generation_config.temperature == 0.25
    assert loaded.generation_config.eos_token_id == list(checkpoints.STOP)
    assert loaded.tokenizer is None and loaded.module is None
    assert loaded.dtype == torch.float32 and loaded.device == torch.device("cpu")
    assert load(loaded) is loaded
    assert load(path).config == loaded.config


def test_load_keeps_the_dtype_asked_for(checkpoint):
    path = checkpoint("llama", dtype=torch.bfloat16)
    assert load(path).dtype == torch.float32
    assert load(path, dtype=torch.bfloat16).decoder.layers[0].qkv.dtype == torch.bfloat16


def write_gguf(model, path) -> None:
    """A Llama model in the format of llama.cpp, whose queries and keys pair neighbours."""
    gguf = pytest.importorskip("gguf")
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, w in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            halves = w.view(-1, 2, c.head_dim // 2, c.hidden_size)
            w = halves.transpose(1, 2).reshape(w.shape)
        place, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(place)}.{kind}", w.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_load_a_gguf_file(tmp_path):
    model = checkpoints.build("llama")
    write_gguf(model, tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", dtype=torch.float64)
    tokens = some_tokens(20)
    want = their_logits(checkpoints.build("llama", dtype=torch.float64), tokens)
    # the file holds the norm's epsilon in single precision
    assert_same_logits(loaded.decoder, tokens, want, 15, 1e-5)
    assert loaded.tokenizer is None and loaded.config.vocab == checkpoints.VOCAB


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A machine without network whose hub cache is empty: the cache's folder."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_load_a_hub_name_from_its_cache(hub, checkpoint):
    commit = "a" * 40
    place = hub / "models--some--tiny"
    checkpoints.make("llama", place / "snapshots" / commit)
    for name in ("main", "old"):
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / name).write_text(commit)
    tokens = some_tokens(9)
    want = Dense(load(checkpoint("llama")).decoder).logits(tokens)
    for revision in (None, "old"):
        decoder = load("some/tiny", revision=revision).decoder
        assert torch.equal(Dense(decoder).logits(tokens), want)
    with pytest.raises(ValueError, match="'some/tiny' is neither a local model folder"):
        load("some/tiny", revision="new")


@pytest.mark.parametrize("name", ["some/model", "no/such/folder", "not a name", ""])
def test_refuse_a_name_that_is_not_there(hub, name):
    with pytest.raises(ValueError, match=f"'{name}' is neither a local model folder nor a model"):
        load(name)


def folder_without_config(folder):
    (folder / "model.safetensors").write_bytes(b"")


def folder_without_weights(folder):
    checkpoints.config("llama").save_pretrained(folder)


def folder_with_broken_config(folder):
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"")


def folder_with_broken_weights(folder):
    checkpoints.config("llama").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")


def folder_with_missing_weights(folder):
    from safetensors.torch import load_file, save_file

    file = checkpoints.make("llama", folder) + "/model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def folder_of_unknown_type(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    (folder / "model.safetensors").write_bytes(b"")


def folder_of_another_type(folder):
    # the weights cannot be read, so they were not
    transformers.GPT2Config().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (folder_without_config, "is not a model's folder: it has no config.json"),
        (folder_without_weights, "is not a model's folder: it has no weights"),
        (folder_with_broken_config, "cannot be loaded: .*not a valid JSON"),
        (folder_with_broken_weights, "cannot be loaded: .*header"),
        (folder_with_missing_weights, "lacks the weights model.layers.1.mlp.up_proj.weight"),
        (folder_of_unknown_type, "supported are Llama 2/3, Mistral, .*nonesuch"),
        (folder_of_another_type, "'gpt2' is not supported; supported are Llama 2/3, Mistral"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_refuse_a_folder(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))


def test_refuse_a_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is a file, but not a GGUF file"):
        load(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"there is no file .*missing.gguf"):
        load(str(tmp_path / "missing.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"text.gguf.* cannot be loaded; supported are .*GGUF"):
        load(str(tmp_path / "text.gguf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype=torch.int8), r"dtype must be one of torch.bfloat16, .*, got torch.int8"),
        (dict(dtype="float32"), "dtype must be one of torch.bfloat16, .*, got 'float32'"),
        (dict(device="nonesuch"), "device 'nonesuch' cannot be used here"),
        (dict(revision="main"), "revision is for hub names, and .* is a local path"),
    ],
    ids=["int8", "dtype-name", "device", "revision"],
)
def test_refuse_arguments_for_a_folder(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        load(checkpoint("llama"), **options)


@pytest.mark.parametrize("made", [checkpoints.build, fuse], ids=["module", "decoder"])
@pytest.mark.parametrize("name", ["dtype", "device", "revision"])
def test_refuse_arguments_that_belong_to_the_model(made, name):
    model = checkpoints.build("llama")
    model = fuse(model) if made is fuse else model
    value = dict(dtype=torch.float64, device="cpu", revision="main")[name]
    with pytest.raises(ValueError, match=f"{name} belongs to the model that is passed, got "):
        load(model, **{name: value})


@pytest.mark.parametrize("model", [3, None, ["a"]], ids=["int", "none", "list"])
def test_refuse_what_is_no_model(model):
    with pytest.raises(TypeError, match=f"model must be .*, got {type(model).__name__}"):
        load(model)


# Models that csd does not run


def config_of(family, **changes):
    return lambda: checkpoints.config(family, **changes)


def rope(kind, **more):
    return dict(rope_type=kind, rope_theta=10000.0, **more)


GPTQ = dict(quant_method="gptq", bits=4)
REFUSED = {
    "encoder-decoder": (transformers.T5Config, "'t5' is an encoder-decoder; csd runs decoders"),
    "gpt2": (transformers.GPT2Config, "model type 'gpt2' is not supported"),
    "gemma2": (transformers.Gemma2Config, "model type 'gemma2' is not supported"),
    "experts": (transformers.Qwen3MoeConfig, "model type 'qwen3_moe' is not supported"),
    "linear": (
        config_of("llama", rope_parameters=rope("linear", factor=2.0)),
        "rope type 'linear' is not supported, only 'default' and 'llama3'",
    ),
    "yarn": (
        config_of(
            "qwen3",
            rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128),
        ),
        "rope type 'yarn' is not supported, only 'default' and 'llama3'",
    ),
    "dynamic": (
        config_of("qwen2", rope_parameters=rope("dynamic", factor=2.0)),
        "rope type 'dynamic' is not supported",
    ),
    "partial-rotary": (
        config_of("llama", rope_parameters=rope("default", partial_rotary_factor=0.5)),
        "partial_rotary_factor other than 1 is not supported",
    ),
    "window-mistral": (
        config_of("mistral", sliding_window=64),
        "sliding_window=64 is in use, .* stay below 64 tokens",
    ),
    "window-qwen2": (
        config_of("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1),
        "sliding_window=64 is in use",
    ),
    "window-qwen3": (
        config_of("qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=0),
        "sliding_window=64 is in use",
    ),
    "quantised-dict": (
        config_of("llama", quantization_config=GPTQ),
        "quantised weights are not supported; load the model in bfloat16",
    ),
    "quantised-object": (
        config_of("llama", quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)),
        "quantised weights are not supported; load the model in bfloat16",
    ),
    "activation": (
        config_of("llama", hidden_act="gelu"),
        "hidden_act='gelu' is not supported, only 'silu'",
    ),
    "mlp-bias": (config_of("llama", mlp_bias=True), "mlp_bias=True is not supported"),
    "bias-llama": (config_of("llama", attention_bias=True), "attention_bias=True is not supp"),
    "bias-qwen3": (config_of("qwen3", attention_bias=True), "attention_bias=True is not supp"),
    "tensor-parallel": (config_of("llama", pretraining_tp=2), "pretraining_tp must be 1"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refuse_a_config(make, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_transformers(make())


NAMES_THE_FAMILIES = ["encoder-decoder", "gpt2", "gemma2", "experts", "activation", "bias-llama"]


@pytest.mark.parametrize("case", NAMES_THE_FAMILIES)
def test_a_refusal_names_what_is_supported(case):
    message = r"Llama 2/3, Mistral, Qwen2/2\.5 and Qwen3 \(dense\)"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_transformers(REFUSED[case][0]())


ACCEPTED = {
    "window-as-long-as-the-context": config_of("mistral", sliding_window=checkpoints.CONTEXT),
    "window-not-used": config_of("qwen2", use_sliding_window=False, sliding_window=64),
    "window-on-no-layer": config_of(
        "qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=2
    ),
    "dequantised": config_of("llama", quantization_config=dict(quant_method="gguf")),
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_accept_a_config(make):
    assert ModelConfig.from_transformers(make()).vocab == checkpoints.VOCAB


def test_config_sizes():
    config = ModelConfig.from_transformers(checkpoints.config("llama3"))
    assert config.rope_scaling == (8.0, 1.0, 4.0, 128) and config.rope_theta == 10000.0
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 1, 8)
    assert not config.qkv_bias and not config.qk_norm
    assert ModelConfig.from_transformers(checkpoints.config("qwen2")).head_dim == 16
    # what a config leaves out
    plain = checkpoints.config("llama", num_key_value_heads=None, head_dim=None)
    config = ModelConfig.from_transformers(plain)
    assert (config.kv_heads, config.head_dim) == (4, 10)


# Random models of known shapes


@pytest.mark.parametrize("std", [0.5, 6.0])
def test_random_model(std):
    decoder = random_model("tiny", dtype=torch.float64, logit_std=std)
    c = decoder.config
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, c.hidden, generator=generator, dtype=torch.float64)
    hidden = rms_norm_ref(x, decoder.norm, c.norm_eps)[0]
    assert decoder.logits(hidden).std().item() == pytest.approx(std, rel=0.05)
    tokens = some_tokens(60, c.vocab)
    logits = Dense(decoder).logits(tokens)
    assert logits.std().item() == pytest.approx(std, rel=0.1)
    # what comes out depends on the prefix, and not on the last token alone
    other = tokens.clone()
    other[:-1] = other[:-1].flip(0)
    assert (Dense(decoder).logits(other)[-1] - logits[-1]).std() > 0.2 * std


def test_random_model_is_the_same_for_a_seed():
    first, again, other = (random_model("tiny", seed=s) for s in (0, 0, 1))
    assert first.head.dtype == torch.bfloat16
    assert torch.equal(first.head, again.head) and torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.head, other.head)


def test_random_model_runs_in_the_engine():
    with csd.Engine(random_model(SHAPES["tiny"], dtype=torch.float32)) as engine:
        result = engine.generate([5, 6, 7], num_samples=2, max_new_tokens=4, seed=0)
    assert [len(s.tokens) for s in result] == [4, 4]


def test_random_model_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"name must be one of 'llama-3\.1-8b', .*, got 'gpt-2'"):
        random_model("gpt-2")


SIZES = {"llama-3.1-8b": 8030261248, "qwen2.5-7b": 7615616512, "smollm2-135m": 134515008}


@pytest.mark.parametrize("name", SIZES)
def test_shapes_have_the_size_of_their_models(name):
    c = SHAPES[name]
    attention = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads)
    bias = c.head_dim * (c.heads + 2 * c.kv_heads) * c.qkv_bias
    layer = attention + bias + 3 * c.hidden * c.intermediate + 2 * c.hidden
    head = c.vocab * c.hidden * (1 if c.tied else 2)
    assert head + c.layers * layer + c.hidden == SIZES[name]


def test_a_shape_is_that_of_its_checkpoint(smollm2_module):
    config = ModelConfig.from_transformers(smollm2_module.config)
    # the file holds the norm's epsilon in single precision
    assert config.norm_eps == pytest.approx(SHAPES["smollm2-135m"].norm_eps, rel=1e-6)
    assert replace(config, norm_eps=1e-5) == SHAPES["smollm2-135m"]


def test_no_module_is_needed():
    with pytest.raises(TypeError, match="Linear is not a transformers model: it has no config"):
        load(nn.Linear(2, 2))
