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
