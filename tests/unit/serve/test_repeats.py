"""A prompt that comes again with its seed is logged once: a client that repeats it wants others."""

import pytest

from csd.models.demo import toy
from csd.serve import AsyncEngine, repeats
from csd.serve.repeats import Repeats


def logged(caplog):
    return sum("a prompt came again with the same seed" in r.message for r in caplog.records)


def test_the_first_repetition_is_logged_and_no_other(caplog):
    noted = Repeats()
    for key, first in [(1, 0), (2, 0), (1, 8)]:
        noted.note(key, first)
    assert logged(caplog) == 0
    for _ in range(3):
        noted.note(2, 0)
    assert logged(caplog) == 1


def test_old_requests_are_forgotten(caplog, monkeypatch):
    monkeypatch.setattr(repeats, "MOST", 2)
    noted = Repeats()
    for key in (1, 2, 3, 1):
        noted.note(key, 0)
    assert logged(caplog) == 0


@pytest.mark.parametrize(("seeds", "want"), [([5, 5], 1), ([5, 6], 0), ([None, None], 0)])
def test_requests_of_a_server(caplog, seeds, want):
    model, tokenizer = toy()
    options = dict(num_samples=2, max_new_tokens=4, ignore_eos=True)
    with AsyncEngine(model, tokenizer=tokenizer, max_slots=2) as engine:
        drawn = [engine.submit("ab", seed=seed, **options).result().tokens for seed in seeds]
    assert logged(caplog) == want
    assert (drawn[0] == drawn[1]) is (seeds[0] == seeds[1] is not None)
