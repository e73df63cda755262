"""The tool that times the quickstart: the commands that it takes from the page."""

import time_quickstart

PAGE = """# Start

## 1. Install

```sh
pip install it
it --version
```

A table is no block:

```
no command
```

## 2. Draw

```sh
it draw
```

```python
print("drawn")
```
"""


def test_blocks_have_their_sections_titles():
    assert time_quickstart.steps(PAGE) == [
        ("1. Install", "pip install it\nit --version"),
        ("2. Draw", "it draw"),
        ("2. Draw", "python - <<'END'\nprint(\"drawn\")\nEND"),
    ]


def test_page_is_read_whole():
    page = time_quickstart.PAGE.read_text()
    found = time_quickstart.steps(page)
    assert len(found) == page.count("```") // 2 - page.count("```text\n")
    assert "csd plot" in found[-1][1]
