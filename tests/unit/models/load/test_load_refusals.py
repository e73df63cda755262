"""Refusals of a model that cannot be loaded, each of which names the reason."""

import json

import pytest
import torch
import transformers
from helpers.models import checkpoints

from csd.models.fused.fuse import fuse
from csd.models.load import load


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
        (folder_without_config, "is not a model folder: it has no config.json"),
        (folder_without_weights, "is not a model folder: it has no weights"),
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
    with pytest.raises(ValueError, match=r"the file .*missing.gguf does not exist"):
        load(str(tmp_path / "missing.gguf"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(
        ValueError, match=r"text.gguf.* cannot be loaded: it does not begin as a GGUF file"
    ):
        load(str(tmp_path / "text.gguf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype=torch.int8), r"dtype must be one of torch.bfloat16, .*, got torch.int8"),
        (dict(dtype="float32"), "dtype must be one of torch.bfloat16, .*, got 'float32'"),
        (dict(device="nonesuch"), "device 'nonesuch' cannot be used here"),
        (dict(revision="main"), "revision must be None for a local path"),
    ],
    ids=["int8", "dtype-name", "device", "revision"],
)
def test_refuse_arguments_for_a_folder(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        load(checkpoint("llama"), **options)


@pytest.mark.parametrize("made", [checkpoints.build, fuse], ids=["module", "decoder"])
@pytest.mark.parametrize("name", ["dtype", "device", "revision", "quantization"])
def test_refuse_arguments_that_belong_to_the_model(made, name):
    model = checkpoints.build("llama")
    model = fuse(model) if made is fuse else model
    values = dict(dtype=torch.float64, device="cpu", revision="main", quantization="q8_0")
    value = values[name]
    with pytest.raises(
        ValueError, match=f"{name} must be None for a model that is already loaded, got "
    ):
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
