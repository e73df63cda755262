"""Processes without a console: services, pythonw, and pipes that no one reads any more."""

import io
import sys

import pytest
from helpers.models.scripted import Letters, PrefixSum, engine
from helpers.targets import slow

import csd
from csd.utils import phases


class Broken(io.StringIO):
    """A pipe without a reader."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def detached():
    stream = io.TextIOWrapper(io.BytesIO())
    stream.detach()
    return stream


CONSOLES = {"none": lambda: None, "closed": closed, "detached": detached, "broken": Broken}
OPTIONS = dict(num_samples=3, max_new_tokens=12, seed=4)


# only with True something is written to such a console
@pytest.mark.parametrize(
    ("kind", "progress"),
    [
        *((kind, True) for kind in CONSOLES),
        *(pytest.param(kind, None, marks=slow if kind != "closed" else ()) for kind in CONSOLES),
    ],
)
def test_calls_are_silent(kind, progress, monkeypatch, toy_folder):
    """Results are those of other processes; nothing goes to standard output in its place."""
    e, written = engine(PrefixSum(), Letters()), io.StringIO()
    want = csd.generate(e, ["ab", "abc"], **OPTIONS)
    of_folder = csd.generate(toy_folder, "ab", **OPTIONS).tokens
    csd.release()
    # each phase writes its line, however short it is
    monkeypatch.setattr(phases, "LONG_ON_CPU", 0.0)
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", CONSOLES[kind]())
    try:
        got = csd.generate(e, ["ab", "abc"], progress=progress, **OPTIONS)
        streamed = [*csd.stream(e, "ab", progress=progress, **OPTIONS)]
        loaded = csd.generate(toy_folder, "ab", progress=progress, **OPTIONS).tokens
        with phases.showing(progress), phases.phase("work", None):
            phases.note("half")
            with csd.AsyncEngine(e, max_tokens=64) as service:
                served = service.submit("ab", **OPTIONS).result(60)
    finally:
        monkeypatch.undo()
        csd.release()
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert len(streamed) == 3 and loaded == of_folder and served.tokens == want[0].tokens
    assert written.getvalue() == ""
