"""README's example and what it prints."""

import json
from pathlib import Path

import csd
from bench.e2e import readme_example, run_picture

PAGE = """before

```python
import csd
print("one")
print("b " * 80)
```

```text
old
```
after
"""


def test_one_command_runs_the_code_and_writes_what_it_prints(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text(PAGE)
    monkeypatch.setattr(readme_example, "ROOT", tmp_path)
    monkeypatch.setattr(readme_example, "RESULT", tmp_path / "example.json")
    run = {"tokens": [[5, 6, 7], [5, 6, 8, 9]], "labels": ["3", "4"]}
    run["sources"] = [["", "", ""], ["", "sibling", "own", ""]]
    saved = f"import json, sys\nopen(sys.argv[1], 'w').write(json.dumps({run}))"
    monkeypatch.setattr(readme_example, "SAVED", saved)
    monkeypatch.setenv("PYTHONPATH", str(Path(csd.__file__).parents[1]))
    readme_example.main([])
    result = json.loads((tmp_path / "example.json").read_text())
    assert result["printed"] == ["one", "b " * 80]
    here = f"# on {result['machine']['cores']} cores of {result['machine']['cpu']}"
    text = f"one\n{('b ' * 60).strip()}\n{('b ' * 20).strip()}\n{here}\n"
    assert (tmp_path / "README.md").read_text() == PAGE.replace("old\n", text)
    assert run_picture.kinds(run["tokens"], run["sources"]) == [
        ["shared", "shared", "drawn"],
        ["shared", "shared", "own", "drawn"],
    ]
    # bars of the legend, and one for each run of tokens of one kind
    assert (tmp_path / "example.svg").read_text().count("<rect") == 4 + 2 + 3


def test_readme_has_what_its_example_printed():
    found = readme_example.BLOCKS.search((readme_example.ROOT / "README.md").read_text())
    result = json.loads(readme_example.RESULT.read_text())
    assert found[0] == found[1] + readme_example.shown(result)
