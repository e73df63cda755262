"""Kernels as compiled for GPUs, run without one (`tools/ptx`): a part of `make test-compiled`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.targets import slow

ROOT = Path(__file__).parents[3]
# a whole generation, which launches every kernel, the attention with each kind of product, and the
# exact ones
TESTS = [
    "hardware/ptx_machine/test_machine.py",
    "unit/engine/lossless/test_engine_triton.py::test_equals_the_references[greedy]",
    (
        "unit/kernels/attention/test_tree_attention.py"
        "::test_tree_attention_triton[(7, 1)-128-torch.float16-64-nodes]"
    ),
    "unit/kernels/attention/test_tree_attention.py::test_tree_attention_triton_bfloat16",
    (
        "unit/kernels/attention/test_packed_attention.py"
        "::test_kernels_in_sixteen_bits[(3, 1)-20-8-torch.bfloat16]"
    ),
    (
        "unit/kernels/layers/test_row_linear.py"
        "::test_a_row_has_the_same_bits_among_any_others[40-64-torch.bfloat16]"
    ),
    "unit/kernels/attention/test_attention_windows.py::test_kernels[groups-out-of-order-all-kernel]",
    "unit/kernels/attention/test_attention_windows.py::test_kernels[one-row-all-exact]",
    (
        "unit/kernels/attention/test_exact_tree.py"
        "::test_a_row_has_the_same_bits_in_any_step[81-torch.float16]"
    ),
]


@slow
@pytest.mark.parametrize(("chip", "names"), [("sm_90", TESTS), ("sm_80", TESTS[2:])])
def test_what_is_compiled_does_what_the_references_do(chip, names):
    # the interpreter cannot share a process with the compiler
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"CSD_PTX": chip, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_")}
    tests = [str(ROOT / "tests" / name) for name in names]
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *tests]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
