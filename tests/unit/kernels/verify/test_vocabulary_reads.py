"""Filters cost no launch, and at most one more pass over the logits, however long the kept list."""

import os

import pytest

from bench.gpu.aot.vocabulary_reads import ROWS, SETTINGS, reads_of
from csd.kernels.verify.triton import launch

pytestmark = pytest.mark.compiled

COMPILED = "CSD_PTX" in os.environ
VOCAB = 6000
# of Llama 3, Gemma 3 and others
MORE = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 64, top-p 0.95": {"top_k": 64, "top_p": 0.95},
    "top-p 0.9, penalty": {"top_p": 0.9, "repetition_penalty": 1.1},
}


def reads(kind, options):
    of_row = reads_of(kind, VOCAB, options, COMPILED)
    return of_row.launches, sum(of_row.loaded.values()) / (2 * VOCAB)


@pytest.mark.parametrize("kind", ROWS)
def test_filters_read_the_logits_at_most_once_more(kind, monkeypatch):
    # a row of 1,024 is as long as lists get, so that a flat row keeps more
    monkeypatch.setattr(launch, "SPLITS", 2)
    monkeypatch.setattr(launch, "LIST", 512)
    launches, plain = reads(kind, {})
    assert launches == ["scan", "compact", "sample", "finish"]
    assert 1 <= plain <= {"narrow": 1.5, "broad": 3.01, "flat": 3.01}[kind]
    for options in (*SETTINGS.values(), *MORE.values()):
        filtered, passes = reads(kind, options)
        assert filtered == launches and passes <= plain + 1.01, options


def test_loads_are_counted():
    # a greedy row reads each logit once, and the head's again
    launches, passes = reads("narrow", {"temperature": 0})
    assert len(launches) == 4 and 1 < passes < 1.5
