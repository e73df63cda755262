"""Kernels compiled ahead of time fit their chip, spill nothing, and are what a launch finds.

Each kernel for each target, in one size where it has several; `make aot` compiles all. A step's
launches are compiled too, as they are launched (`launches.py`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.kernels.step_kernels import STEP
from helpers.targets import slow
from launched import SHAPE

from bench.gpu.aot import SHAPES, TARGETS, problems, run, table
from bench.gpu.aot.compile import at_once, mma_loops
from bench.gpu.aot.run import BUFFER_OPERATIONS, _older_passes
from csd.kernels.attention.triton import launch
from csd.kernels.common.gpu import Chip

ROOT = Path(__file__).parents[3]
# the Triton of torch 2.10 and 2.11
OLDER = ROOT / "build" / "triton-3.6"

KERNELS = {
    "advance_slots",
    "advance_state",
    "commit_kv",
    "commit_tail",
    "draft_tree fill",
    "draft_tree grow",
    "exact_attention pages",
    "exact_attention tail",
    "first_keys",
    "gated_linear",
    "graph_insert allocate",
    "graph_insert claim",
    "graph_insert lead",
    "graph_insert merge",
    "graph_insert observe_claim",
    "layered_dag",
    "merge_partials",
    "packed_attention",
    "packed_attention_backward dkv",
    "packed_attention_backward dq",
    "plan_attention",
    "plan_exact",
    "rms_norm",
    "rotary",
    "row_linear",
    "row_linear add_splits",
    "sample_words",
    "snapshot",
    "suffix_match count",
    "suffix_match take",
    "swiglu",
    "tree_attention",
    "tree_conv",
    "tree_delta_rule tree_state",
    "verify compact",
    "verify finish",
    "verify sample",
    "verify scan",
}


LARGE, SMALL = SHAPES[0], SHAPES[2]
TASKS = [("sm_90", LARGE), ("sm_90", SHAPE), ("sm_80", SMALL), ("gfx942", LARGE)]
CHIPS = dict(TASKS)
TENSOR_CORES = {"sm_100": "tcgen05"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


# searched in "TARGET SHAPE KERNEL": most variants are left to sm_90, on which a spill is a fault
WITHOUT = "|".join(
    (
        # all graphs but the default (sm_90) and one of four orders (others), with the default's
        # context, and what differs from another kernel by a size
        r"^sm_90 .*O=[458]\b",
        r"^(sm_80|gfx942) .*O=[578]\b",
        r"(fill|finish|observe_claim|advance_slots) N=[48]\b",
        "fill N=16, with history",
        r"^(sm_80|gfx942) .*(grow O=4|verify finish|observe_claim N=16)$",
        # of the model that is launched, what depends on its sizes
        rf"^sm_90 {SHAPE.name} (?!(rms_norm F=512 PARTS=1(, of rows|, with residual)?|swiglu)$)",
        # windows, caps and sinks: all three, on sm_90
        r", (window|cap|short values)$",
        r"^sm_90 .*packed_attention[^,]*$",
        r"^(sm_80|gfx942) (?!.*first_keys).*, sinks$",
        # all tiles of products on sm_90
        r"^(sm_80|gfx942) .*_linear BLOCK_T=((16|32|64)|128, )",
        # other flags and sizes
        r"^(sm_80|gfx942) .*dag, chain",
        r"^(sm_80|gfx942) .*SOLVE=False",
        r"^(sm_80|gfx942) .*, (plus one|gelu|of a part)$",
        r"^(sm_80|gfx942) .*(large cache|with residual|of rows|of splits|rotate|silu_mul)",
        r"^(sm_80|gfx942) .*(with bias|F=64|MOVED=False)",
    )
)
# those whose instructions are counted
COUNTED = r"^sm_90 \S+ (verify scan|tree_attention D=128|(row|gated)_linear B)"


# of other chips, kernels whose tiles depend on the chip
OTHER_CHIPS = tuple(name for name in TARGETS if name not in CHIPS)
TILED = r"^\S+ \S+ (tree_attention D=128|exact_attention pages D=128|row_linear BLOCK_T=\d+)$"


@pytest.fixture(scope="module")
def rows(cache):
    """Every kernel for three targets, and most of its variants for one, without WITHOUT.

    `make aot` compiles all specialisations of all shapes and dtypes, and disassembles those of both
    NVIDIA targets.
    """
    tasks = [(target, "bf16", shape) for target, shape in TASKS]
    # one process, since each reads all modules: `make test` has another one beside it
    return run(tasks, processes=1, cache=str(cache), without=WITHOUT, disassembled=COUNTED)


def test_kernels_compile_fit_and_do_not_spill(rows):
    bad = [row for row in rows if problems(row)]
    assert not bad, "\n" + table(bad)


def test_every_row_has_a_name_of_its_own_and_every_kernel_a_row(rows):
    names = [(row["kernel"], row["shape"], row["target"]) for row in rows]
    assert len(set(names)) == len(names)
    for target in CHIPS:
        of_target = [name.partition(",")[0].split() for name, _, t in names if t == target]
        found = {" ".join(w for w in name if "=" not in w and w != "resumed") for name in of_target}
        assert found == KERNELS, target


def test_tree_attention_uses_the_tensor_cores_and_asynchronous_copies(rows):
    found = [row for row in rows if row["kernel"].startswith("tree_attention")]
    assert {row["target"] for row in found} == set(CHIPS)
    want = {"sm_90": ("wgmma", True), "sm_80": ("mma", True), "gfx942": ("mfma", False)}
    for row in found:
        assert (row["mma"], row["async"]) == want[row["target"]], table([row])


def test_a_full_page_of_attention_has_no_mask(rows):
    for row in rows:
        plain = row["kernel"].removesuffix(", large cache") == "tree_attention D=128"
        if plain and row["target"] == "sm_90":
            # a slot's small tile and a large one: full pages, the last page, nodes
            small, last, _, large, masked, _ = row["mma loops"]
            assert small < 0.85 * last and large < 0.85 * masked, table([row])


@slow
@pytest.mark.parametrize("target", OTHER_CHIPS)
def test_tiles_of_other_chips_fit_two_programs(target):
    rows = run([(target, "bf16", LARGE)], without=rf"(?!{TILED})^", disassembled="$^")
    assert len(rows) == 6 and not [row for row in rows if problems(row)], table(rows)
    assert min(row["at once"] for row in rows) >= 2, table(rows)
    assert {row["mma"] for row in rows} == {TENSOR_CORES.get(target, "mma")}, table(rows)


def test_chips_have_tiles_of_their_own_shared_memory():
    chips = {name: target.chip for name, target in TARGETS.items()}
    assert {name: chip.shared >> 10 for name, chip in chips.items()} == {
        "sm_90": 227,
        "sm_80": 163,
        "sm_86": 99,
        "sm_89": 99,
        "sm_100": 227,
        "sm_120": 99,
        "gfx942": 64,
    }
    found = {name: launch._tiles(chip, "bf16", 128) for name, chip in chips.items()}
    assert found["sm_100"] == found["sm_90"] and found["sm_90"]["num_stages"] == 3
    assert found["sm_86"] == found["sm_89"] == found["sm_120"]
    assert found["sm_89"]["BLOCK_N"] == 32 and found["gfx942"]["BLOCK_N"] == 64
    # of a chip that is not known, the least
    assert Chip.of("sm_75").shared == Chip.of("sm_200").shared == 64 << 10


@pytest.mark.parametrize("own", [None, "1"])
def test_only_amds_kernels_are_compiled_with_other_passes(own, monkeypatch):
    """The variable is part of Triton's cache keys: a launch without it would find nothing."""
    name = BUFFER_OPERATIONS
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    for version, target, want in (
        ("3.6.0", "sm_90", own),
        ("3.6.0", "gfx942", "0"),
        ("3.7.1", "gfx942", own),
    ):
        monkeypatch.setattr("triton.__version__", version)
        with _older_passes(target):
            assert os.environ.get(name) == want
        assert os.environ.get(name) == own


def test_loops_that_multiply_are_found():
    lines = ["LDG R0", "HGMMA R1", "@P0 BRA 0x10", "FADD R2", "@P1 BRA 0x30", "BRA 0x0", "EXIT"]
    sass = "".join(f"  /*{16 * i:04x}*/  {line} ;\n" for i, line in enumerate(lines))
    assert mma_loops(sass) == [2]


def test_exact_attention_multiplies_with_one_kind_of_instruction(rows):
    want = {"sm_90": ("wgmma", "mma"), "sm_80": ("mma", "mma"), "gfx942": ("mfma", "mfma")}
    for target, (pages, tail) in want.items():
        found = [r for r in rows if r["target"] == target]
        for name, mma in (("pages", pages), ("tail", tail)):
            of_kernel = [r for r in found if r["kernel"].startswith(f"exact_attention {name}")]
            assert of_kernel and {r["mma"] for r in of_kernel} == {mma}, table(of_kernel)


def test_exact_products_use_the_tensor_cores(rows):
    found = [r for r in rows if r["kernel"].startswith(("row_linear B", "gated_linear B"))]
    found = [r for r in found if r["target"] == "sm_90"]
    assert {"16", "32", "64", "128"} == {r["kernel"].partition("=")[2].split(",")[0] for r in found}
    for row in found:
        assert (row["mma"], row["async"]) == ("wgmma", True), table([row])
        # of a tile's 128 biases a thread reads one
        assert row["narrow"] <= ("with bias" in row["kernel"]), table([row])


def test_exact_products_ask_for_weights_before_they_wait_for_the_launch_before(rows):
    found = [r for r in rows if r["kernel"].startswith(("row_linear B", "gated_linear B"))]
    for row in found:
        assert row["waits"] == (row["target"] == "sm_90"), table([row])
        if row["waits"]:
            # a line of 128 bytes of each row of the weights, for all stages but one
            assert row["prefetches"] == row["stages"] - 1 and not row["early"], table([row])


def test_binaries_are_kept_where_launches_look(rows, cache):
    kept = [path.name for path in cache.glob("*/*.cubin")]
    assert len(kept) == sum(row["target"] != "gfx942" for row in rows)


def test_as_many_programs_run_at_once_as_tiles_are_made_for(rows):
    """With one program fewer on a multiprocessor, nothing hides its loads' latency."""
    least = {
        "tree_attention D=128": 2,
        "exact_attention pages D=128": 2,
        "verify scan": 4,
        "row_linear BLOCK_T=16": 2,
        "row_linear BLOCK_T=32": 2,
        "row_linear BLOCK_T=64": 2,
        "row_linear BLOCK_T=128": 2,
        "gated_linear BLOCK_T=128": 2,
    }
    for kernel, programs in least.items():
        found = [r for r in rows if r["kernel"].startswith(kernel) and r["target"] == "sm_90"]
        assert found and min(r["at once"] for r in found) >= programs, table(found)


def test_at_once():
    # registers, shared memory and warps, each where it is the least
    assert at_once(4, 255, 1024, 227 * 1024) == 2
    assert at_once(4, 128, 112 * 1024, 227 * 1024) == 2
    assert at_once(4, 128, 113 * 1024, 227 * 1024) == 2
    assert at_once(4, 128, 114 * 1024, 227 * 1024) == 1
    assert at_once(8, 32, 0, 227 * 1024) == 8
    assert at_once(1, 16, 0, 163 * 1024) == 32
    # of 48 warps
    assert at_once(8, 32, 0, 99 * 1024) == 6 and at_once(4, 128, 49 * 1024, 99 * 1024) == 2


def test_what_moves_most_is_read_16_bytes_at_a_time(rows):
    """Logits, and keys and values: with narrower loads neither comes near the memory's speed."""
    found = [row for row in rows if row["target"] == "sm_90"]
    for kernel, wide in (("verify scan", 5), ("tree_attention", 64)):
        of_kernel = [row for row in found if row["kernel"].startswith(kernel)]
        assert of_kernel
        for row in of_kernel:
            assert row["wide"] >= wide and not row["narrow"], table([row])


@slow
def test_every_variant_compiles_fits_and_does_not_spill():
    # of AMD's, what the larger heads need more memory for
    tasks = [(target, "bf16", LARGE) for target in ("sm_90", "gfx942")]
    rows = run(tasks, without=r"^gfx942 (?!.*D=128)")
    bad = [row for row in rows if problems(row)]
    assert not bad, "\n" + table(bad)
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    test_what_moves_most_is_read_16_bytes_at_a_time(rows)


def test_problems():
    good = dict(target="sm_90", dtype="bf16", shared=10, limit=10, spills=0, stack=0)
    assert not problems(good)
    assert problems(good | {"shared": 11}) == ["shared memory 11 over 10"]
    assert problems(good | {"spills": 2, "stack": 8}) == ["2 spills, stack 8"]
    # not disassembled
    assert problems(good | {"spills": "-", "stack": 8}) == ["- spills, stack 8"]
    assert not problems(good | {"spills": "-"})
    assert problems({"error": "CompilationError"}) == ["CompilationError"]
    assert not problems(good | {"spills": 2, "target": "sm_80"})


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 16, "bf16"), id="one slot"),
        pytest.param((5, 64, "fp16"), id="five slots", marks=slow),
        pytest.param((1, 16, "bf16", "bench"), id="Triton 3.6, compiled by bench.gpu", marks=slow),
    ],
)
def launches(request, tmp_path_factory):
    """Launches of two equal steps, a list each."""
    path, older = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "bench" in request.param
    folder = tmp_path_factory.mktemp("launches") / "triton"
    if older and not OLDER.is_dir():
        pytest.skip(f"needs {OLDER.relative_to(ROOT)}: make triton-3.6")
    if older:
        path = f"{OLDER}:{path}"
    elif request.param == (1, 16, "bf16"):
        # but for one kernel, what the step's processes would compile is there already
        request.getfixturevalue("rows")
        compiled = request.getfixturevalue("cache")
        norms = [file.parent.name for file in compiled.glob("*/rms_norm_kernel.cubin")]
        assert norms
        shutil.copytree(compiled, folder, ignore=lambda *_: norms)
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit/kernels/launches.py"), *map(str, request.param)],
        env=os.environ
        | {"TRITON_INTERPRET": "0", "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    steps = [[]]
    for row in map(json.loads, done.stdout.splitlines()):
        steps[-1].append(row) if row else steps.append([])
    assert steps.pop() == []
    assert {row["triton"].startswith("3.6.") for row in steps[0]} == {older}
    return steps


def test_every_launch_compiles_and_fits(launches):
    first, _ = launches
    # an integer that is 1 is another specialisation than the one compiled ahead of time
    assert [row["kernel"] for row in first] == [
        f"{name}_kernel" for names in STEP.values() for name in names
    ]
    assert all(row["shared"] <= TARGETS["sm_90"].shared for row in first)
    assert all(min(row["grid"]) >= 1 for row in first)
    # what Triton would ask an allocator for, which nobody has set
    assert not any(row["scratch"] for row in first)


def test_what_is_launched_is_what_is_compiled_ahead_of_time(launches):
    # types, alignment, constexprs, warps: a launch finds the binary in Triton's cache
    other = [row for row in launches[0] if not row["ahead"]]
    assert not other


def test_a_launch_finds_the_binary_that_other_processes_compiled(launches):
    assert not [row["kernel"] for row in launches[0] if not row["kept"]]


def test_a_step_that_ran_once_compiles_nothing_more(launches):
    # a kernel compiled during a capture would end it
    first, second = ([(r["kernel"], r["binary"], r["grid"]) for r in step] for step in launches)
    assert second == first
