"""The system's clock may jump: durations and deadlines are of the monotonic clock."""

import ast
import re
from pathlib import Path

import csd

# what reads the clock itself: the time of an answer and of the totals
TIMES = {
    "serve/http/metrics.py": 1,
    "serve/http/api/response.py": 1,
    "serve/http/api/responses.py": 1,
    "serve/http/server.py": 1,
}
# names without one of which a file has no reading
NAMED = re.compile(r"\b(time\.time|time_ns|from time import|now|utcnow|today)\b")


def readings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns")}:
                yield node
            if node.value.id in ("datetime", "date") and node.attr in ("now", "utcnow", "today"):
                yield node
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (name for name in node.names if name.name in ("time", "time_ns"))


def test_only_times_that_are_shown_are_of_the_system_clock():
    root = Path(csd.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if NAMED.search(text) and (count := len([*readings(ast.parse(text))])):
            found[path.relative_to(root).as_posix()] = count
    assert found == TIMES
