"""A server of a tiny model; `make test-serve` also runs processes, crowds and clients."""

import os

import pytest
from helpers.runs.served import served

import csd
from csd.models.demo import toy


def pytest_collection_modifyitems(items):
    if "CSD_SERVE" in os.environ:
        return
    for item in items:
        if item.path.parent.name == "processes":
            item.add_marker(pytest.mark.skip(reason="make test-serve"))


@pytest.fixture(scope="module")
def model():
    """In float64: samples are the same under any load. Some letters end an answer."""
    model, tokenizer = toy()
    model.generation_config.eos_token_id = [1, 40, 41]
    model._csd_tokenizer = tokenizer
    return model.double()


@pytest.fixture(scope="module")
def engine(model):
    return csd.Engine(model, tokenizer=model._csd_tokenizer, max_slots=16)


@pytest.fixture(scope="module")
def server(engine):
    from csd.serve.http import Limits

    # a busy machine may take long for what is limited by time of the CPU
    limits = Limits(body=20_000, choices=20, read_seconds=120)
    with served(csd.AsyncEngine(engine, max_tokens=400, budget=8), limits=limits) as found:
        yield found


@pytest.fixture(scope="module")
def port(server):
    return server[0]
