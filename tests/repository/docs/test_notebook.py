"""The notebook runs as it stands, on a tiny model, and its saved outputs are of these cells."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
from helpers.targets import slow

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")

PATH = Path(__file__).parents[3] / "examples" / "quickstart.ipynb"
SAVED = nbformat.read(PATH, as_version=4)
MODEL = "model = smollm2_path()"


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook):
    """Kinds of output of each code cell; a stream counts once."""
    return [
        {o.get("name") or tuple(sorted(o.data)) for o in cell.outputs} - {"stderr"}
        for cell in code(notebook)
    ]


@slow
def test_every_cell_runs(toy_folder, tmp_path):
    notebook = deepcopy(SAVED)
    (first,) = (cell for cell in notebook.cells if MODEL in cell.source)
    first.source = first.source.replace(MODEL, f"model = {str(toy_folder)!r}")
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, resources=resources, timeout=120).execute()
    assert kinds(notebook) == kinds(SAVED)
    # a bar by default, though a kernel's standard error is no terminal
    errors = [o.text for c in code(notebook) for o in c.outputs if o.get("name") == "stderr"]
    assert "csd: sampling" in "".join(errors)
    assert (tmp_path / "run.html").is_file()


def test_saved_outputs_are_of_one_whole_run():
    assert [c.execution_count for c in code(SAVED)] == [*range(1, len(code(SAVED)) + 1)]
    shown = [o for cell in code(SAVED) for o in cell.outputs]
    assert not [o for o in shown if o.output_type == "error"]
    assert "text/html" in code(SAVED)[1].outputs[-1].data
    text = "".join(o.text for o in shown if o.output_type == "stream")
    equal = re.search(r"(\d+) of (\d+) answers are equal", text)
    assert equal and equal[1] == equal[2] == "8"
    assert PATH.stat().st_size < 200_000
