import gc
import os
import random
import tempfile
import zlib

# before torch and triton, which read what it sets
from helpers.chosen_device import COMPILED, DEVICE, ON_GPU

# isort: split
import interpreter
import interpreter_types
import numpy as np
import pytest
import torch
from helpers import targets

THREADS = torch.get_num_threads()
# what csd keeps for the user is neither read nor written
KEPT = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = KEPT.name

interpreter.patch_once_a_launch()
interpreter.patch_loop_bounds()
interpreter.patch_exclusive_or()
if os.environ["TRITON_INTERPRET"] == "1":
    interpreter_types.patch()
# a failure within them shows both sides, as one of a test does
pytest.register_assert_rewrite(
    "helpers.checks", "helpers.oracles", "helpers.runs", "decide_cases", "vllm_batch"
)

# The files that take longest, longest first: were one of them begun last, it would run alone. Of
# the first four, of which a process of two takes the first and the last, two compile most of a
# CPU's loops and two none: the other process finds them compiled.
LONGEST = [
    "test_aot",
    "test_exact",
    "test_smollm2",
    "test_exact_tree",
    "test_simulated_bench",
    "test_compiled",
    "test_ray",
    "test_simulated",
    "test_self_check",
    "test_tensor_parallel",
    "test_on_gpu",
    "test_forward",
    "test_families",
    "test_draft_model",
    "test_row_options",
    "test_device_drafter",
    "test_async_engine",
    "test_verify",
    "test_odd_arguments",
    "test_attention_windows",
    "test_draft_tree_triton",
    "test_exact_triton",
    "test_verify_sequences",
    "test_package",
]


def pytest_configure(config):
    """Processes take whole files, in the order below.

    As options of every run they would make each one of processes to pytest-benchmark, which times
    nothing there.
    """
    if DEVICE not in ("cpu", "cuda"):
        got = repr(DEVICE)
        raise pytest.UsageError(f"CSD_TEST_DEVICE must be 'cpu' or 'cuda', got {got}")
    if ON_GPU and os.environ.get("CSD_PTX"):
        raise pytest.UsageError("CSD_TEST_DEVICE=cuda and CSD_PTX exclude each other")
    if ON_GPU and not torch.cuda.is_available():
        raise pytest.UsageError(
            "CSD_TEST_DEVICE=cuda needs a GPU that torch can use, and there is none "
            f"(torch {torch.__version__}, CUDA {torch.version.cuda})"
        )
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # before what is marked slow is left out
    targets.mark_left_out(items)
    if third := os.environ.get("CSD_THIRD"):
        items[:] = targets.third_of(items, int(third))
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed the default generators by the name of the test, and reset the number of threads, which
    bits of torch's sums depend on: results depend on no order."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


def pytest_collection_finish():
    """Exempt the objects that imports have made from garbage collection; they live to the end.

    Else it visits all of them every few seconds, while kernels are interpreted or compiled.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def chip():
    """Launches go to the chip that CSD_PTX names, or to the GPU of CSD_TEST_DEVICE."""
    if ON_GPU:
        from helpers.on_device import on_device

        with on_device(torch.device("cuda")):
            yield
        return
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
    from csd.kernels.verify.triton import launch

    if not COMPILED:
        monkeypatch.setattr(launch, "SPLITS", 2)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, tied=False, dtype=torch.float32): path of a tiny model, written once."""
    from helpers.models import checkpoints

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
    """torchrun(path, folder, *more): runs a script in two processes, which write into it."""
    import subprocess
    import sys
    from pathlib import Path

    tests = Path(__file__).parent

    path_of_imports = f"{tests.parent}:{tests}:{os.environ.get('PYTHONPATH', '')}"

    def run(path, folder, *more):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0",
                str(path),
                str(folder),
                *more,
            ],
            env=os.environ | {"PYTHONPATH": path_of_imports},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run
