"""The parts of `python -m bench kernels` that need no GPU: shapes, bytes, rivals' results."""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.kernels.attention_cases import dense_attention
from helpers.targets import few, slow

from bench.gpu.aot import Shape
from bench.lib.shapes import SHAPES
from bench.micro import kernels
from bench.micro.jobs import step_jobs, step_state
from bench.micro.jobs.attention_job import JobShape, error_of, limit_for, make, shapes
from bench.micro.jobs.attention_others import OTHERS
from bench.micro.jobs.attention_rivals import (
    FULL_RIVALS,
    RIVALS,
    _lines,
    own_of,
    prompt_of,
    visible,
)
from bench.micro.jobs.suffix_gpu import suffix_gpu_job
from bench.micro.kernels import ours
from bench.micro.timing import DISTINCT, copies_for
from csd.kernels.attention import tree_attention_ref
from csd.kernels.attention.commit_kv import commit_kv_triton
from csd.kernels.draft import draft_tree_triton
from csd.kernels.layers.rms_norm import rms_norm_triton
from csd.kernels.layers.rotary import rotary_triton
from csd.kernels.layers.swiglu import swiglu_triton
from csd.kernels.ops import reference

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
JOBS = {
    "ragged": JobShape("tiny", 6, 2, 16, samples=3, nodes=5, prompt=130, committed=70),
    "roots": JobShape("tiny", 4, 4, 16, samples=4, nodes=1, prompt=64, committed=20),
    "one-sample": JobShape("tiny", 3, 1, 32, samples=1, nodes=64, prompt=5, committed=3),
    # of flex_attention's two kernels the one for few rows, and for the prompt the other
    "pairs": JobShape("tiny", 4, 2, 16, samples=26, nodes=5, prompt=20, committed=9),
}
JOB = pytest.mark.parametrize("name", JOBS)


def job(name, dtype=torch.float64):
    return make(JOBS[name], dtype=dtype)


def test_the_twelve_shapes():
    found = shapes()
    assert len(found) == len(set(found)) == 12
    assert {(s.H, s.K, s.D) for s in found} == {(32, 8, 128), (28, 4, 128)}
    assert all(s.rows <= 1024 and s.nodes <= 64 for s in found)
    grid = shapes(full=True)
    assert set(found) <= set(grid)
    # 32 pairs of samples and nodes have at most 1,024 rows
    assert len(grid) == len(set(grid)) == 2 * 32 * 9


@JOB
def test_jobs(name):
    made = job(name)
    s = made.shape
    assert sum(made.lengths) == pytest.approx(s.samples * s.committed, abs=s.samples)
    torch.testing.assert_close(
        tree_attention_ref(**made.arguments), dense_attention(made.arguments)
    )
    other = made.copy()
    assert torch.equal(other.k_pages, made.k_pages)
    assert other.k_pages.data_ptr() != made.k_pages.data_ptr()
    again = job(name)
    assert torch.equal(again.q, made.q) and torch.equal(again.ancestors, made.ancestors)


def test_bytes():
    made = make(JobShape("x", 8, 2, 16, samples=2, nodes=3, prompt=100, committed=50))
    assert sum(made.lengths) == 100
    # 100 + 100 + 6 tokens, 2 heads of 16, keys and values of 2 bytes
    assert made.kv_bytes == 206 * 2 * 16 * 2 * 2
    assert made.moved_bytes == made.kv_bytes + 2 * 6 * 8 * 16 * 2
    assert copies_for(DISTINCT) == 1 and copies_for(DISTINCT - 1) == 2 and copies_for(100) > 1e6


@JOB
def test_samples_see_prompt_and_ancestors(name):
    made = job(name)
    *own, longest = own_of(made)
    seen = visible(made, own[0].shape[1], longest)
    s = made.shape
    for i, n in enumerate(made.lengths):
        for t in range(s.nodes):
            word = int(made.ancestors[i * s.nodes + t])
            nodes = [longest + j for j in range(s.nodes) if word >> j & 1]
            assert seen[i, t].nonzero()[:, 0].tolist() == [*range(n), *nodes]
    assert prompt_of(made)[0].shape == (s.prompt, s.K, s.D)


@few(6)
@JOB
@pytest.mark.parametrize("rival", RIVALS | FULL_RIVALS)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_rivals_compute_the_same(name, rival):
    made = job(name, torch.float32)
    exact = tree_attention_ref(**job(name).arguments)
    call, order = (RIVALS | FULL_RIVALS)[rival](made)
    out = order(call())
    assert out.shape == exact.shape
    # float32 draws are not the float64 ones rounded
    exact = tree_attention_ref(**made.to(torch.float64).arguments)
    assert error_of(out, exact) <= limit_for(torch.float32)


@pytest.mark.parametrize(
    ("heads", "samples", "rows", "lines", "tiled"),
    [
        # heads, rows and lines a row as flex_attention's kernel for few rows takes them
        (8, 256, 1, (256, 8, 1), False),
        (8, 4, 16, (4, 8, 16), False),
        (8, 8, 32, (8, 8, 32), True),
        (8, 1, 64, (1, 8, 64), True),
        # seven heads are no power of two
        (14, 256, 1, (256, 2, 7), False),
        (14, 16, 16, (16, 2, 112), True),
        # its other kernel takes each head by itself
        (8, 1, 256, (1, 2, 1024), False),
        (14, 8, 32, (8, 2, 224), False),
    ],
)
def test_flex_attention_arguments(heads, samples, rows, lines, tiled):
    shape = JobShape("x", heads, 2, 16, samples=samples, nodes=rows, prompt=1, committed=1)
    found, each, options = _lines(
        torch.empty(samples, rows, heads, 16), SimpleNamespace(shape=shape)
    )
    assert found.shape[:3] == lines and found.is_contiguous()
    assert each == (1 if lines[1] == heads else heads // 2)
    assert options["enable_gqa"] == (lines[1] == heads)
    assert options.get("kernel_options") == ({"BLOCK_M": 64} if tiled else None)


def test_ours_interpreted():
    made = job("ragged", torch.float16)
    exact = tree_attention_ref(**made.to(torch.float64).arguments)
    call, order = ours(made)
    assert error_of(order(call()), exact) <= limit_for(torch.float16)


def test_a_wrong_result_is_found():
    exact = torch.randn(5, 7, dtype=torch.float64)
    wrong = exact.clone()
    wrong[2, 3] += 1
    assert error_of(exact.bfloat16(), exact) <= limit_for(torch.bfloat16) < error_of(wrong, exact)
    wrong[2, 3] = float("nan")
    assert error_of(wrong, exact) == float("inf")


TINY = Shape.of("tiny", replace(SHAPES["tiny"], vocab=199))
SIZES = step_state.Sizes(slots=4, groups=2, rows=20, text=40)


def test_step_jobs():
    for maker in step_jobs.makers(reference(), TINY, SIZES, CPU, torch.float32):
        found = maker(1)
        found.check()
        assert found.moved > 0 and found.footprint > 0
        found.call()


@slow
def test_step_jobs_interpreted():
    ops = replace(
        reference(),
        rms_norm=rms_norm_triton,
        rotary=rotary_triton,
        swiglu=swiglu_triton,
        commit_kv=commit_kv_triton,
        draft_tree=draft_tree_triton,
    )
    made = step_jobs.makers(ops, TINY, SIZES, CPU, torch.float16)
    # the graph's insert takes seconds
    for maker in made[len(step_jobs.GRAPHS) :]:
        maker(1).check()


def test_step_jobs_find_a_wrong_kernel():
    class Wrong:
        def __getattr__(self, name):
            right = getattr(reference(), name)

            def call(*args):
                out = right(*args)
                first = out[0] if isinstance(out, tuple) else out
                for x in (first, getattr(first, "token", None), getattr(first, "sample", None)):
                    if isinstance(x, torch.Tensor):
                        x[1:2] += 1
                return out

            return call

    made = step_jobs.makers(Wrong(), TINY, SIZES, CPU, torch.float32)
    # insert and commit return nothing to spoil
    named = {maker.func.__name__: maker for maker in made}
    for name in ("draft_tree", "verify", "rms_norm", "rotary", "swiglu"):
        with pytest.raises(AssertionError):
            named[name](0).check()


@pytest.fixture
def clock(monkeypatch):
    """A clock that calls everything once: 2 microseconds a call, two sets of buffers."""

    def replayed(calls, replays):
        assert len(calls) == 2 or len({id(c) for c in calls}) == 1
        for call in calls:
            call()
        return 2.0, 1.5, 2.5

    monkeypatch.setattr(kernels, "replayed", replayed)
    monkeypatch.setattr(kernels, "copies_for", lambda footprint: 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_attention_rows(clock):
    def wrong(job):
        call, order = ours(job)
        return call, lambda out: order(out).flip(0)

    providers = {"csd": ours} | RIVALS | OTHERS | {"wrong": wrong}
    rows = kernels.attention_rows(JOBS["ragged"], providers, 1e9, 1, device="cpu")
    found = {r["provider"]: r for r in rows}
    moved = make(JOBS["ragged"]).moved_bytes
    for name in ("csd", *RIVALS):
        assert found[name]["us"] == 2 and found[name]["note"] == "", found[name]
        assert found[name]["percent_of_copy"] == pytest.approx(100 * moved / 2e-6 / 1e9)
        assert 0 < found[name]["error"] < limit_for(torch.bfloat16)
    assert found["wrong"]["note"] == "wrong" and found["wrong"]["us"] is None
    for name in OTHERS:
        if importlib.util.find_spec(name) is None:
            assert found[name]["us"] is None and "No module named" in found[name]["note"]


def test_step_rows(clock):
    made = step_jobs.makers(reference(), TINY, SIZES, CPU, torch.float32)
    row = kernels.step_row(made[-1], "tiny", 1e9, 1)
    # gate and up of 160 each are read, 160 written, for 20 rows
    assert row["us"] == 2 and row["megabytes"] == pytest.approx(20 * 480 * 4 / 1e6)
    assert row["shape"] == "tiny M=20 F=160"


def test_failures_are_recorded_and_stop_no_other_kernel(clock, capsys):
    def fails(*_):
        raise RuntimeError("out of shared memory")

    def swiglu(seed):
        made = step_jobs.makers(reference(), TINY, SIZES, CPU, torch.float32)[-1]
        return replace(made(seed), check=fails)

    row = kernels.step_row(partial(swiglu), "tiny", 1e9, 1)
    assert (row["us"], row["note"]) == (None, "RuntimeError: out of shared memory")
    assert row["kernel"] == "swiglu"
    assert row.keys() == kernels.step_row(partial(fails), "tiny", 1e9, 1).keys()
    rows = kernels.attention_rows(JOBS["ragged"], {"csd": fails, "ours": ours}, 1e9, 1, "cpu")
    assert [r["us"] for r in rows] == [None, 2] and "shared memory" in rows[0]["note"]
    # the whole of it is on stderr
    assert capsys.readouterr().err.count("Traceback") == 3


def test_suffix_gpu_is_optional():
    if "suffix_gpu" in sys.modules:
        pytest.skip("suffix-gpu is installed")
    with pytest.raises(ImportError):
        suffix_gpu_job(SIZES, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit, match="2"):
        kernels.main([])
    assert "a GPU that torch can use is needed" in capsys.readouterr().err
