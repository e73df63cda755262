"""Checkpoints that are damaged or not what their config says: a ValueError that names them."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers.models import checkpoints
from safetensors.torch import load_file, save_file

from csd.cli.main import main
from csd.models.load import load


@pytest.fixture
def folder(tmp_path):
    return Path(checkpoints.make("qwen2", tmp_path / "model"))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swap(folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].t().contiguous()}, path, {"format": "pt"})


def shorten(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


class Runs:
    def __reduce__(self):
        return os.system, ("touch pickle-was-run",)


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Runs(), file)


def a_pickle_in_a_checkpoint(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"a": Runs()}, folder / "pytorch_model.bin")


def junk(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"junk")


CASES = {
    "swapped shapes": (swap, "the shapes of its weights do not"),
    "torn": (shorten, "cannot be loaded"),
    "another vocabulary": (lambda f: edit(f, vocab_size=50), "the shapes of its weights do not"),
    "fewer layers": (
        lambda f: edit(f, num_hidden_layers=1, layer_types=None, max_window_layers=1),
        "has weights that .* 1 layers, as in its config, does not use",
    ),
    "more layers": (lambda f: edit(f, num_hidden_layers=5, layer_types=None), "lacks the weights"),
    "other heads": (lambda f: edit(f, num_attention_heads=0), "invalid config|cannot be loaded"),
    "no number": (lambda f: edit(f, hidden_size="a"), "has an invalid config.json"),
    "a list": (lambda f: (f / "config.json").write_text("5"), "invalid config.json"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 10**5), "invalid config.json"),
    "only a pickle": (only_a_pickle, "a pickle file that executes code"),
    "pickled code": (a_pickle_in_a_checkpoint, "a pickle file that executes code"),
    "junk": (junk, "cannot be loaded"),
    "tokenizer": (
        lambda f: (f / "tokenizer_config.json").write_text("[]"),
        "the tokenizer of .* cannot be",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_checkpoints(folder, case, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    damage, message = CASES[case]
    damage(folder)
    with pytest.raises(ValueError, match=message) as found:
        load(folder)
    assert str(folder) in str(found.value)
    assert len(str(found.value)) < 1000
    assert main(["sample", str(folder), "a"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "pickle-was-run").exists()
