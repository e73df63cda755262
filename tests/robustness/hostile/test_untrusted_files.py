"""Files and texts of models that were written to harm whoever loads or prints them."""

import json
import os
import pty
import shutil
import sys

import pytest

import csd
from csd.cli.common import show
from csd.utils.check import without_controls

HARM = "a\x1b]0;title\x07b\x9b2Jc\x7f\r\u202ed"


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_an_index_names_files_of_its_folder(name, toy_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(toy_folder, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must name files of its"):
        csd.Engine(str(folder))


def test_a_terminal_does_not_obey_a_models_text(monkeypatch):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        show(HARM + "\u00e9\ttab\nnext")
        found = os.read(controller, 1000).decode()
    os.close(controller)
    assert found.startswith(r"a\x1b]0;title\x07b\x9b2Jc\x7f\r\u202ed" + "\u00e9\t")
    assert "\x1b" not in found


def test_a_pipe_gets_the_text_as_it_is(capsys):
    show(HARM)
    assert capsys.readouterr().out == HARM + "\n"
    assert without_controls("plain \u200d text\n") == "plain \u200d text\n"
