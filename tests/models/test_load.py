"""Loading of a model from a folder, a file, the hub or an object."""

import json
import logging

import checkpoints
import pytest
import torch
import transformers
from dense import Dense, assert_near, some_tokens, their_logits

from csd.models.fuse import fuse
from csd.models.load import load


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


def test_load_finds_the_tokenizer(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 0, "yes": 1}, unk_token="no"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="no")
    fast.save_pretrained(tmp_path)
    checkpoints.make("llama", tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (tmp_path, module):
        assert load(model).own_tokenizer()("yes no yes")["input_ids"] == [1, 0, 1]
        assert load(model, tokenizer=fast).tokenizer is fast
    # for a module that came from the hub, what is on this machine
    asked = []
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda name, **options: asked.append((name, options)),
    )
    module.config._name_or_path = "some/model"
    load(module).own_tokenizer()
    assert asked == [("some/model", {"local_files_only": True})]


def test_load_keeps_the_dtype_asked_for(checkpoint):
    path = checkpoint("llama", dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        loaded = load(path, dtype=dtype)
        assert loaded.dtype == loaded.decoder.layers[0].qkv.dtype == dtype


@pytest.mark.parametrize(
    "stored,in_hardware,want",
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float16, False, torch.float32),
        (torch.float32, True, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_on_a_cpu_is_one_that_it_multiplies(
    checkpoint, monkeypatch, stored, in_hardware, want
):
    monkeypatch.setattr("csd.models.load.multiplies_bfloat16", lambda: in_hardware)
    assert load(checkpoint("llama", dtype=stored), device="cpu").decoder.norm.dtype == want


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
    # the file holds the norm's epsilon in single precision
    epsilon = float(torch.tensor(1e-6, dtype=torch.float32))
    model = checkpoints.build("llama", rms_norm_eps=epsilon)
    write_gguf(model, tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", dtype=torch.float64)
    tokens = some_tokens(20)
    want = their_logits(model.double(), tokens)
    assert_near(loaded.decoder, Dense(loaded.decoder).logits(tokens), want)
    assert loaded.tokenizer is None and loaded.config.vocab == checkpoints.VOCAB


def test_the_header_of_a_gguf_file_is_parsed_once_a_load(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_gguf(checkpoints.build("llama"), path)
    read = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path, *args):
            read.append(path)
            super().__init__(path, *args)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    names = gguf.get_tensor_name_map
    for _ in range(2):
        load(path, device="cpu")
    assert len(read) == 2
    path.write_text("hello")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(path, device="cpu")
    # nothing of it is left in the package
    assert gguf.GGUFReader is Counting and gguf.get_tensor_name_map is names


@pytest.mark.parametrize("in_hardware", [False, True])
def test_a_gguf_file_is_read_without_a_warning(tmp_path, monkeypatch, caplog, in_hardware):
    monkeypatch.setattr("csd.models.load.multiplies_bfloat16", lambda: in_hardware)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    write_gguf(checkpoints.build("llama"), tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", device="cpu")
    assert loaded.dtype == (torch.bfloat16 if in_hardware else torch.float32)
    assert "dtype" not in caplog.text


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


def test_a_refusal_by_the_config_comes_before_weights_are_read(toy_folder, monkeypatch):
    """The refusal is that of the check of a GPU's kernels."""
    seen = []

    def refuse(*found):
        seen.append(found)
        raise RuntimeError("wrong here")

    def read(*args, **options):
        raise AssertionError("weights are read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    for dtype in (None, torch.float16):
        with pytest.raises(RuntimeError, match="wrong here"):
            load(toy_folder, device="cpu", dtype=dtype, before=refuse)
    device, dtype, config = seen[-1]
    assert device.type == "cpu" and dtype == torch.float16 and config.heads > 0
