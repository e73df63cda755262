"""A run for the tests of its report, and a browser that shows it."""

import pytest
from helpers.chromium import chromium

from csd.cli.main import main


@pytest.fixture(scope="package")
def place(tmp_path_factory, toy_folder):
    """A folder with what `csd sample --json` printed, of a run whose prompt is HTML."""
    import contextlib
    import io

    import csd

    folder = tmp_path_factory.mktemp("report")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(
            [
                "sample",
                toy_folder,
                "</script><b>7 & 7</b>",
                "-n",
                "4",
                "--max-new-tokens",
                "40",
                "--temperature",
                "0.4",
                "--seed",
                "1",
                "--budget",
                "16",
                "--json",
                "--drafts",
            ]
        )
    csd.release()
    assert code == 0
    (folder / "out.json").write_text(printed.getvalue())
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found
