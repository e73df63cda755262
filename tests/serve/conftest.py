"""`make test` runs the paths of a server; `make test-serve` also processes, crowds and clients."""

import os

import pytest

# what needs no package but the server's, and seconds
FAST = ("test_http",)


def pytest_collection_modifyitems(items):
    if "CSD_SERVE" in os.environ:
        return
    for item in items:
        if item.path.parent.name == "serve" and item.path.stem not in FAST:
            item.add_marker(pytest.mark.skip(reason="make test-serve"))
