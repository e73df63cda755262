"""Loading of a model from a folder, a file, the hub or an object."""

import logging

import pytest
import torch
import transformers
from helpers.models import checkpoints
from helpers.oracles.dense import Dense, assert_near, some_tokens, their_logits

from csd.models.load import load
from csd.models.load.gguf import header


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
    path = tmp_path / "tiny.gguf"
    write_gguf(checkpoints.build("llama"), path)
    read, own = [], header._Parser.header
    monkeypatch.setattr(header._Parser, "header", lambda parser: read.append(1) or own(parser))
    load(path, device="cpu")
    assert len(read) == 1
    path.write_text("hello")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(path, device="cpu")
    write_gguf(checkpoints.build("llama"), path)
    load(path, device="cpu")
    assert len(read) == 3


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
    what = (
        "is neither a local model folder nor a model" if name == "some/model" else "no such folder"
    )
    with pytest.raises(ValueError, match=f"'{name}'.* {what}"):
        load(name)
