import gc
import os

# read when triton is imported, so before anything else imports it. With CSD_PTX=sm_90 kernels run
# as compiled for that chip, instruction by instruction (tools/ptx)
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("CSD_PTX") else "1")

import interpreter
import interpreter_types
import pytest
import torch

interpreter.patch_once_a_launch()
interpreter.patch_loop_bounds()
interpreter.patch_exclusive_or()
if os.environ["TRITON_INTERPRET"] == "1":
    interpreter_types.patch()
# a failure within them shows both sides, as one of a test does
pytest.register_assert_rewrite("dense", "engine_cases", "equal_fields")

# The files that take longest, longest first: were one of them begun last, it would run alone. Of
# the first four, of which a process of two takes the first and the last, two compile most of a
# CPU's loops and two none: the other process finds them compiled.
LONGEST = [
    "test_aot", "test_exact", "test_smollm2", "test_compiled", "test_simulated_bench",
    "test_ray", "test_exact_tree", "test_simulated", "test_tensor_parallel",
    "test_draft_tree_triton", "test_verify", "test_lossless", "test_exact_triton",
    "test_engine_triton", "test_verify_engine", "test_verify_sequences", "test_engine",
    "test_distribution",
]  # fmt: skip


def pytest_configure(config):
    """Processes take whole files, in the order below.

    As options of every run they would make each one of processes to pytest-benchmark, which times
    nothing there.
    """
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    """What imports have made lives to the end: the collector of garbage leaves it alone.

    Else it looks at all of it every few seconds, while kernels are interpreted or compiled.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def chip():
    """Launches go to the chip that CSD_PTX names."""
    if "CSD_PTX" not in os.environ:
        yield
        return
    from ptx.launch import emulated

    with emulated(os.environ["CSD_PTX"]):
        yield


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


@pytest.fixture
def ordered_products(monkeypatch):
    """Interpreted products add up in one order; where kernels are compiled, they do anyway."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreter.ordered_dot)


@pytest.fixture
def few_splits(monkeypatch):
    """Interpreted, a short row of logits is in 2 parts: of 16, as compiled, 15 would be empty."""
    from csd.kernels.verify import launch

    if "CSD_PTX" not in os.environ:
        monkeypatch.setattr(launch, "SPLITS", 2)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, tied=False, dtype=torch.float32): path of a tiny model, written once."""
    import checkpoints

    return checkpoints.Cache(tmp_path_factory.mktemp("checkpoints"))


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

    root = Path(__file__).parents[1]

    def run(script, folder):
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
             "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
             str(root / "tests/helpers" / script), str(folder)],
            env=os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    return run
