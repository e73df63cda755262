"""The lint of lines by room: what it counts, what it refuses, and the table that it writes."""

import tomllib

import pytest
import room_lines


@pytest.fixture
def folder(tmp_path):
    """A repository with two rooms and one file beside them."""
    for path, lines in (("a/x.py", 3), ("a/b/y.py", 2), ("c/z.py", 4), ("d.py", 1)):
        file = tmp_path / "csd" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n" * lines)
    (tmp_path / "csd/a/page.html").write_text("\n" * 9)
    table = (
        "[tool.x]\ny = 1\n\n# the goal\n[tool.rooms]\na = 5\nc = 4\ncsd = 1\n\n[tool.z]\nw = 2\n"
    )
    (tmp_path / "pyproject.toml").write_text(table)
    return tmp_path


def test_rooms_within_the_table_pass(folder, capsys):
    assert room_lines.counted(folder / "csd") == {"a": 5, "c": 4, "csd": 1}
    assert room_lines.main(folder, []) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["a", "5", "of", "5"] and shown[-1] == ["sum", "10", "of", "10"]


@pytest.mark.parametrize("path", ["c/more.py", "new/room.py"])
def test_a_room_with_more_lines_than_the_table_fails(folder, path, capsys):
    (folder / "csd" / path).parent.mkdir(exist_ok=True)
    (folder / "csd" / path).write_text("x = 1\n")
    # another room's deletions make no place
    (folder / "csd/a/x.py").write_text("")
    assert room_lines.main(folder, []) == 1
    room = path.partition("/")[0]
    assert f"more lines than [tool.rooms] of pyproject.toml: {room};" in capsys.readouterr().err


def test_the_table_is_written_anew_in_its_place(folder):
    (folder / "csd/new").mkdir()
    (folder / "csd/new/room.py").write_text("x = 1\n")
    (folder / "csd/c/z.py").unlink()
    assert room_lines.main(folder, ["--write"]) == room_lines.main(folder, []) == 0
    text = (folder / "pyproject.toml").read_text()
    assert tomllib.loads(text) == {
        "tool": {"x": {"y": 1}, "rooms": {"a": 5, "csd": 1, "new": 1}, "z": {"w": 2}}
    }
    assert "# the goal\n[tool.rooms]\n" in text


def test_the_table_has_a_number_for_every_room():
    table = tomllib.loads((room_lines.ROOT / "pyproject.toml").read_text())["tool"]["rooms"]
    assert {*room_lines.counted(room_lines.ROOT / "csd")} == {*table}
    assert sum(table.values()) < 76_500
