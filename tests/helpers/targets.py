"""Marks of tests that `make test` leaves to targets of their own."""

import os

import pytest

slow = pytest.mark.skipif(not os.environ.get("CSD_SLOW"), reason="make test-slow")
