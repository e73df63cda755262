"""The benchmark of attention over packed rows, at a tiny size."""

import json

from bench.micro import packed_rows


def test_both_sides_are_timed(tmp_path):
    path = tmp_path / "packed.json"
    packed_rows.main(["--shapes", "5+2x3", "--rounds", "2", "--device", "cpu", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["shape"] == "5+2x3" and row["sdpa / packed"] > 0
