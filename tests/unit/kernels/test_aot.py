"""Kernels compiled ahead of time fit their chip, spill nothing, and are what a launch finds.

Each kernel for each target, in one size where it has several; `make aot` compiles all.
"""

import os

import pytest
from helpers.targets import slow

from bench.gpu.aot import SHAPES, TARGETS, problems, run, table
from bench.gpu.aot.compile import at_once, mma_loops
from bench.gpu.aot.run import BUFFER_OPERATIONS, _older_passes
from csd.kernels.attention.triton import launch
from csd.kernels.common.gpu import Chip

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


CHIPS = {"sm_90": SHAPES[0], "sm_80": SHAPES[2], "gfx942": SHAPES[0]}
TENSOR_CORES = {"sm_100": "tcgen05"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


# all graphs but one of the default's orders (sm_90) and one of four (others), with the default's
# context, and what differs from another kernel by a size
WITHOUT = "|".join(
    (
        r"^sm_90 .*O=[458]\b",
        r"^(sm_80|gfx942) .*O=[578]\b",
        r"(fill|finish|observe|advance_slots) N=[48]\b",
        "fill N=16, with history",
        # on sm_90 of growth both kinds, of a layer both kinds, and all tiles of products
        r"^(sm_80|gfx942) draft_tree grow O=4$",
        r"^(sm_80|gfx942) layered_dag, chain",
        r"^(sm_80|gfx942) (row|gated)_linear BLOCK_T=(16|32|64)\b",
        # variants by a flag or a size, on sm_90 all
        r"^(sm_80|gfx942) .*, (plus one|gelu|of a part)$",
        r"^(sm_80|gfx942) .*(large cache|with residual|of rows|of splits|rotate|silu_mul)",
        r"^(sm_80|gfx942) .*(BLOCK_T=128, split|with bias|F=64|SOLVE=False|MOVED=False)",
        # of attention with windows, caps and sinks, on sm_90 that which has all
        r", (window|cap|short values)$",
        r"^(sm_80|gfx942) (?!first_keys).*, sinks$",
        # of packed samples that one alone
        r"^sm_90 packed_attention[^,]*$",
    )
)


# of other chips, kernels whose tiles depend on the chip
OTHER_CHIPS = tuple(name for name in TARGETS if name not in CHIPS)
TILED = r"^\S+ (tree_attention D=128|exact_attention pages D=128|row_linear BLOCK_T=\d+)$"


@pytest.fixture(scope="module")
def rows(cache):
    """Every kernel for three targets: a shape a target, of two head sizes, without WITHOUT.

    `make aot` compiles all specialisations of all shapes and dtypes, and disassembles those of both
    NVIDIA targets.
    """
    tasks = [(target, "bf16", shape) for target, shape in CHIPS.items()]
    return run(tasks, cache=str(cache), without=WITHOUT, disassembled=("sm_90",))


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
    rows = run([(target, "bf16", SHAPES[0])], without=rf"(?!{TILED})^", disassembled=())
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


def test_problems():
    good = dict(target="sm_90", dtype="bf16", shared=10, limit=10, spills=0, stack=0)
    assert not problems(good)
    assert problems(good | {"shared": 11}) == ["shared memory 11 over 10"]
    assert problems(good | {"spills": 2, "stack": 8}) == ["2 spills, stack 8"]
    assert problems({"error": "CompilationError"}) == ["CompilationError"]
    assert not problems(good | {"spills": 2, "target": "sm_80"})
