"""Lines of Python in each room of csd, against the table in pyproject.toml.

python tools/room_lines.py            prints both; an error where a room has more lines
python tools/room_lines.py --write    makes today's numbers the table
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = "[tool.rooms]"


def counted(package: Path) -> dict[str, int]:
    """Lines of the Python files below each folder of a package, and of those directly in it."""
    rooms: dict[str, int] = {}
    for path in sorted(package.rglob("*.py")):
        folder, *rest = path.relative_to(package).parts
        room = folder if rest else "csd"
        rooms[room] = rooms.get(room, 0) + len(path.read_bytes().splitlines())
    return rooms


def report(rooms: dict[str, int], most: dict[str, int]) -> tuple[list[str], list[str]]:
    """Lines to print, and the rooms that have more lines than the table, or are not in it."""
    shown = [
        f"{room:<14}{rooms.get(room, 0):>7,} of {most.get(room, 0):>7,}"
        for room in sorted({*rooms, *most})
    ]
    shown.append(f"{'sum':<14}{sum(rooms.values()):>7,} of {sum(most.values()):>7,}")
    return shown, [room for room, lines in rooms.items() if lines > most.get(room, 0)]


def rewritten(text: str, rooms: dict[str, int]) -> str:
    """The text of pyproject.toml with another table."""
    begin = text.index(TABLE) + len(TABLE)
    rows = "".join(f"{room} = {lines}\n" for room, lines in sorted(rooms.items()))
    end = re.search(r"\n(?![a-z]+ = \d+\n)", text[begin + 1 :])
    rest = text[begin + 1 + end.end() :] if end else ""
    return f"{text[:begin]}\n{rows}\n{rest}".rstrip("\n") + "\n"


def main(root: Path, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make today's numbers the table")
    write = parser.parse_args(arguments).write
    page, rooms = root / "pyproject.toml", counted(root / "csd")
    text = page.read_text()
    if write:
        text = rewritten(text, rooms)
        page.write_text(text)
    lines, above = report(rooms, tomllib.loads(text)["tool"]["rooms"])
    print("\n".join(lines))
    if above:
        print(
            f"more lines than [tool.rooms] of pyproject.toml: {', '.join(above)}; delete some, or "
            "run `python tools/room_lines.py --write` and give the reason in the commit",
            file=sys.stderr,
        )
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
