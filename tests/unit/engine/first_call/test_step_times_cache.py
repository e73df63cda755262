"""Step times are cached across processes; a bad or missing cache is never an error."""

import json
from dataclasses import replace

import pytest
import torch

import csd
from bench.lib.shapes import SHAPES, random_model
from csd.engine.first_call.time_steps import (
    LONGEST,
    load_step_times,
    measure,
    refined,
    save_step_times,
    with_faster_threads,
)
from csd.engine.resources.step_times import StepTimes
from csd.engine.step.budget import StepTimeTable
from csd.engine.step.budget.estimator import MEASUREMENTS

PROMPT = [5, 6, 7, 5, 6]


def engine(hidden=64, max_slots=4):
    shape = replace(SHAPES["tiny"], hidden=hidden)
    model = random_model(shape, dtype=torch.float32)
    return csd.Engine(model, max_slots=max_slots, kernels="reference")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The engines that have measured their steps, on a machine without other work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engines = []

    def measure(self, repeats=3):
        engines.append(self)
        return StepTimeTable([1, 4, 16], [1.0, 1.5, 4.0])

    monkeypatch.setattr(StepTimes, "measure", measure)
    return engines


def drawn(engine):
    return engine.generate(PROMPT, num_samples=3, max_new_tokens=6, seed=0).tokens


def files(tmp_path):
    return sorted((tmp_path / "csd").iterdir())


def test_each_kind_of_step_is_measured_once(measured, tmp_path):
    drawn(engine())
    drawn(again := engine())
    assert len(measured) == 1 and again.step_times.table.seconds == [1.0, 1.5, 4.0]
    drawn(engine(hidden=32))
    drawn(engine(max_slots=1))
    assert len(measured) == 3 and len(files(tmp_path)) == 3
    drawn(engine(hidden=32))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        drawn(engine())
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"of": "x", "rows": [1',
        b"\xff\xfe",
        b"[1, 2]",
        None,
        dict(of="another"),
        dict(rows=[1, 2]),
        dict(seconds=[1.0, -1.0, 2.0]),
        dict(seconds=[1.0, float("nan"), 2.0]),
        dict(rows=[4, 1, 2]),
        dict(rows="1, 4, 16"),
        dict(measurements=0),
    ],
    ids=[
        "empty",
        "torn",
        "noise",
        "list",
        "folder",
        "other",
        "short",
        "negative",
        "nan",
        "falling",
        "text",
        "unmeasured",
    ],
)
def test_unusable_files_are_measured_anew(content, measured, tmp_path, caplog):
    want = drawn(engine())
    (path,) = files(tmp_path)
    good = path.read_text()
    if content is None:
        path.unlink()
        path.mkdir()
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(good) | content))
    else:
        path.write_bytes(content)
    caplog.clear()
    assert drawn(engine()) == want
    assert len(measured) == 2
    assert sum("measured again" in r.message for r in caplog.records) == 1
    # a folder stays, a file is whole again
    assert files(tmp_path) == [path] and (content is None or path.read_text() == good)


def test_tokens_do_not_depend_on_the_table(measured, tmp_path):
    want = drawn(engine())
    (path,) = files(tmp_path)
    for seconds in ([1.0, 1.0, 1.0], [1.0, 100.0, 1e6]):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))
        planted = engine()
        assert drawn(planted) == want
        assert planted.step_times.table.seconds == seconds
    assert len(measured) == 1


def test_unwritable_folder_is_no_error(measured, tmp_path, caplog):
    (tmp_path / "csd").write_text("in place of the folder")
    drawn(engine())
    drawn(engine())
    assert len(measured) == 2 and "cannot be cached" in caplog.text


def test_custom_decoders_are_not_cached(measured, tmp_path):
    class Own(csd.models.fused.decoder.Decoder):
        pass

    for _ in range(2):
        own = engine()
        own.decoder.__class__ = Own
        drawn(own)
    assert len(measured) == 2 and not (tmp_path / "csd").exists()


def test_disturbed_measurements_are_cached_with_a_mark_and_refined(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = [0.0]
    monkeypatch.setattr("csd.engine.first_call.time_steps.time.perf_counter", lambda: now[0])

    def table(others):
        took = iter(others)

        def run(rows):
            now[0] += rows * next(took, 1)

        return measure(run, [1, 2, 4], worth=6.0)

    # two runs that nothing times come first; one of three may be disturbed
    quiet, busy = table([1, 1, 1, 9, 1]), table([1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7])
    assert quiet.steady and quiet.sizes == [1, 2, 4] and not busy.steady
    save_step_times("busy", busy)
    assert load_step_times("busy").seconds == busy.seconds
    assert not load_step_times("busy").steady
    save_step_times("quiet", quiet)
    assert load_step_times("quiet").seconds == quiet.seconds and load_step_times("quiet").steady


def test_a_marked_table_is_refined_until_two_measurements_agree(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timings = iter([[1.0, 5.0, 8.0], [3.0, 1.5, 9.0], [1.1, 1.6, 7.0]])
    rounds = []

    def measure(self, repeats=3):
        rounds.append(repeats)
        return StepTimeTable([1, 4, 16], next(timings), steady=False)

    monkeypatch.setattr(StepTimes, "measure", measure)
    tables = []
    for _ in range(4):
        drawn(made := engine())
        tables.append((made.step_times.table.seconds, made.step_times.table.steady))
    assert tables == [
        ([1.0, 5.0, 8.0], False),
        ([1.0, 1.5, 8.0], False),
        ([1.0, 1.5, 7.0], True),
        ([1.0, 1.5, 7.0], True),
    ]
    # a process that refines a table times each size once, and none times a steady one
    assert rounds == [3, 1, 1]


def test_processes_of_a_busy_machine_measure_a_few_times_only(monkeypatch, tmp_path):
    """Without two measurements that agree, a table has the smallest times of MEASUREMENTS."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure(self, repeats=3):
        measured.append(2.0 ** -len(measured))
        return StepTimeTable([1, 4], [measured[-1], 3 * measured[-1]], steady=False)

    monkeypatch.setattr(StepTimes, "measure", measure)
    want = drawn(engine())
    for _ in range(MEASUREMENTS + 2):
        assert drawn(made := engine()) == want
    assert len(measured) == MEASUREMENTS == made.step_times.table.measurements
    assert made.step_times.table.seconds == [measured[-1], 3 * measured[-1]]
    # the mark is kept
    assert made.step_times.table.settled and not made.step_times.table.steady


@pytest.mark.parametrize("beside, want", [(1.1, 2), (1.9, 2), (2.1, 1), (30.0, 1)])
def test_steps_are_measured_with_one_thread_where_two_take_far_longer(beside, want, monkeypatch):
    """beside: seconds of a step with two threads; one thread takes 1 s."""
    now, before = [0.0], torch.get_num_threads()
    monkeypatch.setattr("csd.engine.first_call.time_steps.time.perf_counter", lambda: now[0])

    def run():
        now[0] += 1.0 if torch.get_num_threads() == 1 else beside

    torch.set_num_threads(2)
    try:
        with with_faster_threads(run) as competing:
            assert torch.get_num_threads() == want and competing == (want == 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_slow_measurement_ends_after_few_sizes(monkeypatch):
    now, ran = [0.0], []
    monkeypatch.setattr("csd.engine.first_call.time_steps.time.perf_counter", lambda: now[0])

    def run(rows):
        ran.append(rows)
        now[0] += LONGEST

    table = measure(run, [1, 2, 4, 8, 16, 32], worth=6.0)
    # two runs that nothing times come first
    assert ran == [1, 2, 1, 2, 4, 8] and table.sizes == [1, 2, 4, 8] and not table.steady
    # ranks that measure together run the same passes, whatever their times are
    ran.clear()
    assert measure(run, [1, 2, 4, 8, 16, 32]).steady and len(ran) == 2 + 3 * 6


def test_refined_tables_have_the_sizes_of_both():
    one = StepTimeTable([1, 4], [1.0, 2.0], steady=False)
    other = StepTimeTable([1, 4, 16], [1.1, 1.9, 5.0], steady=False)
    for table in (refined(one, other), refined(other, one)):
        assert table.sizes == [1, 4, 16] and table.seconds == [1.0, 1.9, 5.0] and table.steady
