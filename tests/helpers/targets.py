"""Marks of tests that `make test` leaves to targets of their own."""

import pytest

# `make test-slow` runs the marked tests of the files that import this
slow = pytest.mark.slow
