"""Samples have the same bits on every x86 CPU, whatever the width of its vectors is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import checkpoints
from helpers.runs import machines

import csd
from csd.kernels.backends import loops
from csd.kernels.common.cpu import compiles
from csd.kernels.numba import lanes
from csd.kernels.numba.jit import loop
from csd.kernels.numba.math import log
from csd.models.fused.fuse import fuse, pack
from csd.models.fused.rope import Rope, default_frequencies, rope_tables
from csd.models.portable import first_other
from csd.utils.device import cpu_name, instructions

GOLDEN = json.loads(machines.FILE.read_text())
pytestmark = pytest.mark.skipif(
    not compiles() or first_other(machines.decoder_of("llama"), torch.float32, loops()) is not None,
    reason="the loops of an x86 CPU with AVX2 and FMA",
)


def is_confirmed() -> bool:
    """True if the records held on this kind of CPU, one of `machines` in the file."""
    return [machines.kind(), *instructions()] in [
        [m["kind"], *m["instructions"]] for m in GOLDEN["machines"]
    ]


def check(differs: str | None) -> None:
    """Fail for a difference on a confirmed kind of CPU; elsewhere it is an expected failure."""
    if differs and not is_confirmed():
        pytest.xfail(
            f"nobody has compared these bits on {cpu_name()} ({machines.kind()}, "
            f"{' '.join(instructions())}), where {differs} differs: please report this line"
        )
    assert differs is None, differs


def first_difference(got: dict, want: dict) -> str | None:
    """The first operation, or else the first token, that differs; None if all bits are equal."""
    for name, digest in got["operations"].items():
        if digest != want["operations"][name]:
            return f"the operation {name!r}"
    for model, samples in got["samples"].items():
        for i, (sample, other) in enumerate(zip(samples, want["samples"][model], strict=True)):
            for name in ("tokens", "logprobs", "raw"):
                pairs = zip(sample[name], other[name], strict=True)
                at = next((j for j, (x, y) in enumerate(pairs) if x != y), None)
                if at is not None:
                    return f"{name} of sample {i} of {model}, from position {at}"
    return None


def test_the_golden_samples_are_drawn_on_this_cpu():
    got = {"operations": machines.operations(), "samples": machines.samples()}
    check(first_difference(got, GOLDEN))


# instruction sets without which loops are compiled; the library's functions get narrow ones too
NARROWER = {"AVX2": ("avx512",), "SSE": ("avx", "fma", "f16c", "xop", "vaes", "vpclmul", "gfni")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_vectors_give_the_same_bits(name, tmp_path):
    dropped = NARROWER[name]
    if not any(f"+{x}" in lanes.FEATURES for x in dropped):
        pytest.skip("the CPU has no wider vectors")
    features = ",".join(
        f"-{x[1:]}" if x[1:].startswith(dropped) else x for x in lanes.FEATURES.split(",")
    )
    tiny = name == "SSE"  # which packed weights do not have
    wide = {"operations": machines.operations(), "samples": machines.samples(tiny)}
    narrow = run_machines(
        [machines.__file__, *["tiny"] * tiny],
        tmp_path,
        {
            "NUMBA_CPU_NAME": "x86-64" if tiny else "x86-64-v3",
            "NUMBA_CPU_FEATURES": features,
            "ATEN_CPU_CAPABILITY": "default" if tiny else "avx2",
        },
    )
    check(first_difference(narrow, wide))


# csd chooses widths and layouts for AVX512, and numba compiles for the instructions of this CPU
LAYOUTS = """
import runpy
from numba import config
from numba.core.registry import cpu_target
cpu_target.target_context.codegen()
config.CPU_FEATURES = {features!r}
from csd.kernels.layers.quantized.cpu import tile
from csd.kernels.numba import lanes, tiles
config.CPU_FEATURES = None
assert lanes.WIDTH == 64 and tiles.WIDE
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_layouts_of_avx512_give_the_same_bits(tmp_path):
    if "+avx512f" in lanes.FEATURES:
        pytest.skip("the layouts are this CPU's own")
    features = re.sub(r"-(avx512(?:f|bw|vl|dq|cd)\b)", r"+\1", lanes.FEATURES)
    code = LAYOUTS.format(features=features, path=machines.__file__)
    laid_out = run_machines(["-c", code], tmp_path, {})
    own = {"operations": machines.operations(), "samples": machines.samples()}
    assert first_difference(laid_out, own) is None


def run_machines(arguments: list[str], cache: Path, environment: dict) -> dict:
    """Results of `helpers/runs/machines.py`, as a process of its own prints them."""
    root = Path(machines.__file__).parents[3]
    variables = (
        os.environ
        | environment
        | {
            "NUMBA_CACHE_DIR": str(cache),
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
        }
    )
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def logs(kind):
    """`log` of numbers of all magnitudes, and the true values in a wider type."""

    @loop
    def run(x, y):
        for i in range(x.shape[0]):
            y[i] = log(x[i])

    span = 60 if kind == np.float32 else 900
    wide = machines.numbers((200_000,), 9, 1.0).double().numpy()
    x = np.concatenate([2.0 ** (span * wide), 1 + wide / 2]).astype(kind)
    y = np.empty_like(x)
    run(x, y)
    return y, np.log(x.astype(np.longdouble))


def test_logarithms_are_next_to_the_true_values():
    single, true = logs(np.float32)
    # of 400,000 numbers at most one is rounded to a neighbour
    assert (single != true.astype(np.float32)).sum() <= 1
    double, true = logs(np.float64)
    assert (np.abs(double - true) <= np.spacing(np.abs(double))).all()


def test_rotary_tables_are_correctly_rounded():
    rope = Rope(1e4, None, "default", 1.0)
    tables = rope_tables(rope, 32, 4096, torch.float32, "cpu")
    angle = torch.arange(4096, dtype=torch.float32)[:, None] * default_frequencies(rope, 32)
    for table, true in zip(tables, (angle.double().cos(), angle.double().sin()), strict=True):
        assert (table[:, :16] != true.float()).sum() <= 2


def packed(family: str, dtype=torch.float32, **changes):
    decoder = fuse(checkpoints.build(family, dtype=dtype, vocab_size=96, **changes))
    pack(decoder)
    return decoder


SIZES = dict(hidden_size=64, intermediate_size=64, head_dim=16)


def test_an_engine_names_where_it_is_exact():
    assert csd.Engine(machines.decoder_of("qwen2")).exact_on == "every x86 CPU"
    model = checkpoints.build("llama", dtype=torch.float32)
    assert csd.Engine(model, exact=True).exact_on == "this kind of CPU"
    assert csd.Engine(model, exact=False).exact_on is None


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda: packed("llama", torch.bfloat16, **SIZES), "the products in bfloat16"),
        # 48 rows are no whole number of blocks with AVX512
        (lambda: packed("mistral", **SIZES, sliding_window=8), "the attention with a window"),
        (lambda: packed("llama", **(SIZES | {"hidden_size": 48})), "the product out of layer 0"),
        (lambda: checkpoints.build("llama", dtype=torch.float32), "the product qkv of layer 0"),
    ],
    ids=["bfloat16", "window", "width", "module"],
)
def test_other_models_are_refused_by_operation(make, operation):
    with pytest.raises(ValueError, match=f"exact must be True or False here.*: {operation}"):
        csd.Engine(make(), exact="portable")
    with pytest.raises(ValueError, match="kernels='reference'"):
        csd.Engine(machines.decoder_of("llama"), kernels="reference", exact="portable")
