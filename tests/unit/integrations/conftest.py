"""Engines that `csd.generate` keeps are released after a test that asks for it."""

import pytest

import csd


@pytest.fixture
def released():
    yield
    csd.release()
