"""Commands on files of others: one line of error and an exit code, whatever the file is."""

import gzip
import json
import os
import re
import socket
import struct
import threading

import pytest

from csd.cli.main import main
from csd.utils import check, files
from csd.utils.files import check_no_pipes, open_input

GOOD = {"prompt_ids": [5, 6], "samples": [[7, 8, 9]]}
TITLE = "\x1b]0;title\x07"


def without_phases(error):
    """Lines of a command beside those of the phase of loading."""
    return "".join(x for x in error.splitlines(True) if not x.startswith("csd: loading "))


def as_pipe(path):
    os.mkfifo(path)


def as_folder(path):
    path.mkdir()


def as_loop(path):
    path.symlink_to(path)


def as_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def as_data(data):
    return lambda path: path.write_bytes(data)


PACKED = gzip.compress(json.dumps(GOOD).encode() * 500)
KINDS = {
    "pipe": ("a.jsonl", as_pipe),
    "packed pipe": ("a.jsonl.gz", as_pipe),
    "folder": ("a.jsonl", as_folder),
    "loop": ("a.jsonl", as_loop),
    "socket": ("a.jsonl", as_socket),
    "absent": (f"a{TITLE}.jsonl", lambda path: None),
    "name": (f"a{TITLE}.jsonl", as_data(b'{"x')),
    "empty": ("a.jsonl", as_data(b"")),
    "no text": (
        "a.jsonl",
        as_data(b'{"prompt_ids": [1], "samples": [[1]], "problem": "\xff\xfe"}\n'),
    ),
    "zeros": ("a.jsonl", as_data(bytes(5000))),
    "deep": ("a.jsonl", as_data(b'{"prompt_ids": ' + b"[" * 10**6 + b"\n")),
    "title": ("a.jsonl", as_data(b'{"prompt": "\\u001b]0;title\\u0007", "temperature": -1}\n')),
    "torn": ("a.jsonl.gz", as_data(PACKED[: len(PACKED) // 2])),
    "bomb": ("a.jsonl.gz", as_data(gzip.compress(bytes(30 << 20)))),
    "giant line": ("a.jsonl", as_data(b"a" * (30 << 20))),
    "lists": ("a.jsonl", as_data(b'{"samples": [' + b"[]," * 100_000 + b"[]]}\n")),
}
COMMANDS = {
    "replay": lambda file, model, out: ["replay", file],
    "plot": lambda file, model, out: ["plot", file, "-o", f"{out}.png"],
    "report": lambda file, model, out: ["report", file, "-o", f"{out}.html"],
    "prior": lambda file, model, out: ["prior", file, "-o", out],
    "import": lambda file, model, out: ["import", file, "--model", model, "-o", out],
    "eval": lambda file, model, out: ["eval", file, "--model", model, "-o", out, "--quiet"],
    "record": lambda file, model, out: ["record", model, file, "-o", out],
    "audit": lambda file, model, out: ["audit", file, "--model", model],
    "train-head": lambda file, model, out: ["train-head", model, file, "-o", out, "--quiet"],
    "cost": lambda file, model, out: ["replay", f"{out}.good", "--cost", file],
    "history": lambda file, model, out: ["sample", model, "ab", "--history", file],
    "sample": lambda file, model, out: ["sample", model, "ab", "--prior", file],
    "warmup": lambda file, model, out: ["warmup", file],
    "model": lambda file, model, out: ["sample", file, "ab"],
}
# what these take: an empty history, a new one, and a prior without n-grams
TAKEN = {("history", kind) for kind in ("empty", "absent")} | {("prior", "empty")}
# names of the hub, which is asked for them
HUB = {(command, "absent") for command in ("warmup", "model")}
# the readers that several commands share are run on every kind with one of them
MANY = ("replay", "report", "prior")
CASES = [
    (command, kind)
    for command in COMMANDS
    for kind in KINDS
    if (command in MANY or kind in ("pipe", "folder", "loop", "name"))
    and (command, kind) not in TAKEN | HUB
]


@pytest.mark.parametrize(("command", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_a_command_ends_with_one_line(command, kind, tmp_path, toy_folder, monkeypatch, capsys):
    monkeypatch.setattr(files, "MAX_LINE", 1 << 24)
    monkeypatch.setattr(files, "MAX_LISTS", 50_000)
    name, make = KINDS[kind]
    path, out = tmp_path / name, tmp_path / "out"
    (tmp_path / "out.good").write_text(json.dumps(GOOD) + "\n")
    make(path)
    codes = []
    # a command that waits for the file fails here, not the whole run
    run = threading.Thread(
        target=lambda: codes.append(main(COMMANDS[command](str(path), toy_folder, str(out)))),
        daemon=True,
    )
    run.start()
    run.join(60)
    assert codes == [2], codes if codes else "waits"
    error = without_phases(capsys.readouterr().err)
    assert error.startswith("csd: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert error == check.without_controls(error) and len(error) < 2000
    assert not out.exists() or (out.is_dir() and not (out / "model.safetensors").exists())


def test_a_pipe_with_a_writer_is_read(tmp_path, capsys):
    """The shell's <(command) is one, and its writer may be slow."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    begins = threading.Event()

    def write():
        with open(path, "wb") as file:
            begins.wait(20)
            file.write(json.dumps(GOOD).encode() + b"\n")

    thread = threading.Thread(target=write)
    thread.start()
    # holds the pipe open until the writer has opened it
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        while thread.is_alive():
            threading.Timer(0.2, begins.set).start()
            codes = main(["replay", str(path)])
            break
    thread.join()
    assert held.closed and codes == 0, capsys.readouterr().err


def test_a_device_is_read_up_to_a_limit(monkeypatch, capsys):
    monkeypatch.setattr(files, "MAX_LINE", 1 << 20)
    for command in ("replay", "report"):
        assert main([command, "/dev/zero", *["-o", "/dev/null"][: 2 * (command == "report")]]) == 2
        assert "must have at most 1 MiB" in capsys.readouterr().err


def test_open_input_keeps_errors_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        open_input(tmp_path / "absent")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        open_input(tmp_path)
    (tmp_path / "text").write_bytes(b"text")
    with open_input(tmp_path / "text") as file:
        assert file.read() == b"text"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "x"])
def test_a_model_with_a_pipe_is_refused_before_it_is_read(tmp_path, toy_folder, name, capsys):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(toy_folder, folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} must be a regular file"):
        check_no_pipes(folder)
    for command in (["sample", str(folder), "a"], ["warmup", str(folder)]):
        assert main(command) == 2
        assert f"{name} must be a regular file" in capsys.readouterr().err


def parts(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def written(header, data, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def changed(**fields):
    """A header whose first tensor has other fields."""

    def make(header, data):
        first = next(name for name in header if name != "__metadata__")
        return written(header | {first: header[first] | fields}, data)

    return make


def overlapping(header, data):
    first, second = [name for name in header if name != "__metadata__"][:2]
    same = {"data_offsets": header[first]["data_offsets"]}
    return written(header | {second: header[second] | same}, data)


TENSORS = {
    "beyond the file": changed(data_offsets=[0, 1 << 40]),
    "negative": changed(data_offsets=[-8, 10]),
    "overlapping": overlapping,
    "size of a shape": changed(shape=[1 << 62, 4]),
    "negative shape": changed(shape=[-1, 4]),
    "dtype": changed(dtype="X9"),
    "header size": lambda header, data: written(header, data, 1 << 63),
    "header beyond the file": lambda header, data: written(header, data, 90_000_000),
    "deep header": lambda header, data: written(b"[" * 100_000, data),
    "many": lambda header, data: written(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)},
        b"",
    ),
    "title": lambda header, data: written(
        {TITLE: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b""
    ),
    "empty": lambda header, data: b"",
}


@pytest.mark.parametrize("case", TENSORS)
def test_hostile_safetensors(case, tmp_path, toy_folder, capfd):
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(toy_folder, folder)
    path = folder / "model.safetensors"
    path.write_bytes(TENSORS[case](*parts(path)))
    assert main(["sample", str(folder), "a"]) == 2
    error = without_phases(capfd.readouterr().err)
    assert error.count("\n") == 1 and str(folder) in error and TITLE not in error, error


def text(value):
    return struct.pack("<Q", len(value)) + value


def key(value, name=b"general.architecture"):
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(name) + value


LIST, STRING, BYTES = struct.pack("<I", 9), struct.pack("<I", 8), struct.pack("<I", 4)
HEADERS = {
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0),
    "keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62),
    "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "length of a name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + b"abc",
    "length of a text": key(STRING + struct.pack("<Q", 1 << 62) + b"llama"),
    "length of a list": key(LIST + BYTES + struct.pack("<Q", 1 << 60) + bytes(64)),
    "length of a list of texts": key(LIST + STRING + struct.pack("<Q", 1 << 60) + bytes(64)),
    "length of a list of lists": key(LIST + LIST + struct.pack("<Q", 1 << 60) + bytes(64)),
    "nested lists": key(
        LIST + (LIST + struct.pack("<Q", 1)) * 20_000 + BYTES + struct.pack("<Q", 1) + bytes(4)
    ),
    "type": key(struct.pack("<I", 77) + bytes(64)),
    "title": key(STRING + text(TITLE.encode())),
    "no text": key(STRING + text(b"\xff\xfe")),
    "magic alone": b"GGUF",
    "empty": b"",
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_gguf(case, tmp_path, capfd):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADERS[case])
    assert main(["sample", str(path), "a"]) == 2
    error = without_phases(capfd.readouterr().err)
    assert error.count("\n") == 1 and str(path) in error and TITLE not in error, error
