"""Files that are written at once: beside other writers, on full disks and in read-only folders."""

import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import csd
from csd.engine.results import views
from csd.evaluate import plot
from csd.research.training.run import STATE, Folder
from csd.state.context_table import PRIOR_KEY
from csd.traces.traces import Trace, read_traces, write_traces


@cache
def prior_of(number):
    prior = csd.Prior(contexts=1 << 10)
    prior.table.entry_group.fill_(PRIOR_KEY)
    prior.vocab = number + 1
    return prior


def vocab_of(path):
    with safe_open(path, "pt") as file:
        assert len(file.get_tensor("entry_total")) == 1 << 10
        return int(file.metadata()["vocab"]) - 1


def save_report(path, number):
    views.write_report(SimpleNamespace(tokenizer="any", number=number), path)


def save_figure(path, number):
    pytest.importorskip("matplotlib")
    points = [plot.Point(k, k, number, number, number) for k in (1, 2)]
    plot.draw({f"number {number}.": points}, str(path), "samples", "maj")


def label_of(path):
    text = path.read_text()
    assert text.rstrip().endswith("</svg>")
    return int(re.search(r"number (\d+)\.", text)[1])


def save_state(path, number):
    folder = Folder(path.parent)
    try:
        folder.save({"settings": {}, "number": number, "rest": torch.zeros(5000)})
    finally:
        folder.close()


def save_traces(path, number):
    write_traces(path, [Trace(0, [1], [[number] * 5000], 1.0, None)])


# kind: name of the file, how to write a number, how to read it
SAVERS = {
    "prior": ("p.safetensors", lambda path, i: prior_of(i).save(path), vocab_of),
    "figure": ("f.svg", save_figure, label_of),
    "report": ("r.html", save_report, lambda path: int(path.read_text().split()[-1])),
    "state": (STATE, save_state, lambda path: torch.load(path)["number"]),
    "traces": ("t.jsonl", save_traces, lambda path: next(read_traces(path)).samples[0][0]),
}


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    monkeypatch.setattr(views, "_pages", [lambda out: f"{'page ' * 10_000}{out.number}"])


@contextmanager
def files_of(size):
    """Within the block files grow to `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["prior", "report"])
def test_saves_at_once_all_succeed(tmp_path, kind):
    """At any time the file is one of them, whole; no other file is left."""
    name, write, read = SAVERS[kind]
    path, ended = tmp_path / name, threading.Event()
    write(path, 10)

    def save(i):
        for _ in range(10):
            write(path, i)

    def check():
        seen = {read(path)}
        while not ended.is_set():
            seen.add(read(path))
        return seen

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(check)
        for writer in [threads.submit(save, i) for i in (11, 12)]:
            writer.result()
        ended.set()
        assert reader.result() <= {10, 11, 12}
    assert read(path) in (11, 12)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("room", [0, 64, 400])
@pytest.mark.parametrize("kind", SAVERS)
def test_a_full_disk_leaves_the_old_file(tmp_path, kind, room):
    """The error names the file."""
    if kind == "figure" and room != 64:
        pytest.skip("drawing takes long")
    name, write, read = SAVERS[kind]
    path = tmp_path / name
    write(path, 10)
    with files_of(room), pytest.raises(OSError, match=str(tmp_path)) as caught:
        write(path, 11)
    assert caught.value.errno is not None
    assert read(path) == 10 and [p.name for p in tmp_path.iterdir()] == [name]
    write(path, 12)
    assert read(path) == 12


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("kind", SAVERS)
def test_a_read_only_folder_keeps_its_file(tmp_path, kind):
    name, write, read = SAVERS[kind]
    path = tmp_path / "to" / name
    path.parent.mkdir()
    write(path, 10)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(OSError, match=str(path.parent)):
            write(path, 11)
    finally:
        path.parent.chmod(0o700)
    assert read(path) == 10


@pytest.mark.parametrize("kind", SAVERS)
def test_a_folder_that_is_missing_is_an_error_that_names_the_file(tmp_path, kind):
    if kind == "state":
        pytest.skip("a training run makes its folder")
    name, write, _ = SAVERS[kind]
    with pytest.raises(OSError, match=name):
        write(tmp_path / "none" / name, 1)
