import os

# read when triton is imported, so before anything else imports it
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN or a large negative number: what nobody writes shows in the result."""

    def poisoned(make):
        def call(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan") if x.is_floating_point() else -(1 << 20))

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, tied=False, dtype=torch.float32): path of a tiny model, written once."""
    import checkpoints

    return checkpoints.Cache(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def smollm2():
    """An engine with SmolLM2-135M-Instruct in float32."""
    import csd
    from csd.models.demo import smollm2_path

    return csd.Engine(smollm2_path())


@pytest.fixture(scope="session")
def smollm2_module():
    """SmolLM2-135M-Instruct as transformers loads it, in float32."""
    import transformers

    from csd.models.demo import smollm2_path

    folder, _, name = smollm2_path().rpartition("/")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """Folder of the toy model and its tokenizer."""
    from csd.models.demo import toy

    folder = tmp_path_factory.mktemp("toy")
    for part in toy():
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def torchrun():
    """torchrun(script, folder): runs a script of tests/ in two processes, which write there."""
    import subprocess
    import sys
    from pathlib import Path

    here = Path(__file__).parent

    def run(script, folder):
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
             "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(here / script), str(folder)],
            env=os.environ | {"PYTHONPATH": f"{here.parent}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    return run
