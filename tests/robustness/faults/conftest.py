"""An engine that calls fail on, and the samples that they should keep."""

import pytest
from faults import OPTIONS, PROMPTS, fresh

import csd


@pytest.fixture(scope="module")
def e():
    return fresh()


@pytest.fixture(scope="module")
def expected(e):
    return [out.tokens for out in csd.generate(e, PROMPTS, **OPTIONS)]
