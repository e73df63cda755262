"""The check at a GPU's first use, which is kept, and what a machine lacks for it."""

import json
import subprocess
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from csd.doctor import SMALL
from csd.doctor import report as machine
from csd.engine.first_call import check as self_check_cache
from csd.models import load
from csd.utils import cache_folder


@pytest.fixture
def first(monkeypatch, tmp_path):
    """A GPU at its first use; `runs` are the checks that were started."""
    runs, results = [], []

    def run(command, **options):
        runs.append(command)
        return results[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    fake = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(self_check_cache, "subprocess", fake)

    def use(dtype=torch.bfloat16, **result):
        results.append(SimpleNamespace(**{"returncode": 0, "stdout": "", "stderr": ""} | result))
        self_check_cache.require_check(torch.device("cuda"), dtype, SMALL)

    return use, runs


def output(**rows):
    checks = [{"name": k, "calls": 1, "error": v} for k, v in rows.items()]
    return json.dumps({"passed": False, "reports": [{"checks": checks}]})


def test_the_first_use_of_a_gpu_is_checked_once(first, capsys):
    use, runs = first
    with pytest.raises(RuntimeError, match=r"on GPU failed: verify: 3 of 9 integers differ\. No s"):
        use(stdout=output(verify="3 of 9 integers differ"))
    with pytest.raises(RuntimeError, match="the process exited with code -11: Segmentation fault"):
        use(returncode=-11, stderr="a\nSegmentation fault\n")
    use(stdout=output(verify=None))
    assert len(runs) == 3 and "--head-dim=16" in runs[0] and "--dtype=bfloat16" in runs[0]
    assert "--vocab=499" in runs[0]
    lines = capsys.readouterr().err.splitlines()
    # one as a check begins, one with its seconds
    assert len(lines) == 6 and all("checking the kernels on GPU" in x for x in lines)
    # it has passed: another process would not check again, another dtype would
    use(stdout="")
    assert len(runs) == 3
    use(torch.float32, stdout=output(verify=None))
    assert len(runs) == 4


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", None], ids=["empty", "torn", "noise", "folder"]
)
def test_a_check_that_was_not_kept_whole_is_done_again(content, first, tmp_path):
    use, runs = first
    use(stdout=output(verify=None))
    (path,) = (tmp_path / "csd").glob("check-*.json")
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    use(stdout=output(verify=None))
    assert len(runs) == 2


@pytest.mark.parametrize("home", [True, False], ids=["no folder", "no home"])
def test_a_check_that_cannot_be_kept_ends_no_call(home, first, tmp_path, caplog, monkeypatch):
    use, runs = first
    (tmp_path / "csd").write_text("in place of the folder")
    if not home:

        def refuse():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cache_folder.Path, "home", refuse)
    use(stdout=output(verify=None))
    assert "cannot be cached" in caplog.text
    use(stdout=output(verify=None))
    assert len(runs) == 2


def test_a_gpu_that_another_process_has_for_itself_is_not_checked(first, caplog):
    use, runs = first
    busy = "CUDA error: all CUDA-capable devices are busy or unavailable"
    use(returncode=2, stderr=f"csd: device 'cuda' cannot be used here: {busy}\n")
    assert "not checked" in caplog.text
    # it has not passed either
    use(stdout=output(verify=None))
    assert len(runs) == 2


def test_missing_compiler_is_reported_first(monkeypatch, tmp_path):
    assert machine.check_compiler().calls
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    found = machine.check_compiler()
    assert "no C compiler: apt-get install gcc python3-dev" in found.error
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/cc")
    paths = {"posix_prefix": {"include": str(tmp_path)}}
    # a distribution's own scheme, which Triton does not use either
    monkeypatch.setattr(machine.sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: paths[scheme])
    assert "Python.h is missing in" in machine.check_compiler().error
    (tmp_path / "Python.h").touch()
    assert machine.check_compiler().passed


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    assert machine.check_folder().passed
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = machine.check_folder().error
    assert str(tmp_path / "file") in found and "set TRITON_CACHE_DIR to a writable folder" in found


def test_an_instance_of_a_gpu_is_named(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert machine.instance_note(device) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 MIG 1g.10gb")
    chip = SimpleNamespace(multi_processor_count=16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    assert "an instance of a GPU (MIG) with 16 multi" in machine.instance_note(device)


def test_a_gpu_of_another_process_is_an_error_that_names_the_mode(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nline 2")

    monkeypatch.setattr(load.torch, "empty", refuse)
    with pytest.raises(
        ValueError, match="unavailable; in compute-exclusive mode only one process can use"
    ):
        load.usable("cuda")


def test_ranks_share_one_check(first, monkeypatch):
    """Engines that begin while another checks wait for its result."""
    _, runs = first

    def slow(*args, **options):
        runs.append(args)
        time.sleep(0.3)
        return SimpleNamespace(returncode=0, stdout=output(verify=None), stderr="")

    monkeypatch.setattr(self_check_cache.subprocess, "run", slow)
    ask = partial(self_check_cache.require_check, torch.device("cuda", 0), torch.float32, SMALL)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
