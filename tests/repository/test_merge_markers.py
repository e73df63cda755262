"""No tracked text file has the markers of a merge that was not resolved."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# also behind a quote's or a diff's first letters, which an editor or a tool has added
MARKER = re.compile(rb"^[>+\- ]*(<{7} |\|{7} |>{7} |={7}\r?$)", re.MULTILINE)


def tracked(folder):
    """Paths of the files that git has in a folder's index; None where it is no working tree."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True)
    if done.returncode:
        return None
    return [folder / name for name in done.stdout.decode().split("\0") if name]


def unresolved(paths):
    """`path:line` of each marker; a file with a zero byte is not text."""
    found = []
    for path in paths:
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" not in data:
            lines = [data.count(b"\n", 0, m.start(1)) + 1 for m in MARKER.finditer(data)]
            found += [f"{path}:{line}" for line in lines]
    return found


def test_no_tracked_text_file_has_a_merge_marker():
    paths = tracked(ROOT)
    if paths is None:
        pytest.skip("needs a working tree of git, whose index lists the files")
    assert len(paths) > 100
    assert unresolved(paths) == []


@pytest.mark.parametrize("marker", ["<" * 7 + " HEAD", "|" * 7 + " base", "=" * 7, ">" * 7 + " a"])
@pytest.mark.parametrize("end", ["\n", "\r\n", ""], ids=["lf", "crlf", "none"])
def test_a_marker_is_found_in_any_line(tmp_path, marker, end):
    for name, before, line in (("first", "", 1), ("later", "a\n\nb\n", 4), ("quoted", "> ", 1)):
        path = tmp_path / name
        path.write_bytes(f"{before}{marker}{end}".encode())
        assert unresolved([path]) == [f"{path}:{line}"]
    plain = tmp_path / "plain"
    plain.write_text(f"a {marker}\n{marker[:6]}\n{'=' * 8}\n")
    assert unresolved([plain]) == []
