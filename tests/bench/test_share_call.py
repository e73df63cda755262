"""`python -m bench share_call` on small traces of our own."""

import json

from targets import slow
from trace_file import trace_file

from bench.studies.history import share_call


@slow
def test_its_table(tmp_path, capsys):
    said = [[5, 6, 7, 8, 9, 10, 11, 12, 20 + i] * 2 for i in range(6)]
    alike = [{"prompt_ids": [60 + i], "samples": [s] * 2} for i, s in enumerate(said)]
    apart = [
        {"prompt_ids": [60 + i], "samples": [list(range(70 + 20 * i, 90 + 20 * i))] * 2}
        for i in range(6)
    ]
    paths = [str(trace_file(tmp_path / f"{n}.jsonl", *rows))
             for n, rows in (("alike", alike), ("apart", apart))]  # fmt: skip
    out = tmp_path / "out.json"
    options = ["--slots", "2", "12", "--samples", "1", "8", "--json", str(out)]
    share_call.main([paths[0], *options])
    share_call.main([paths[1], *options])
    found = json.loads(out.read_text())["rows"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == found
    # more was asked for than is recorded
    assert {r["samples"] for r in found["alike"]} == {1, 2}
    narrow, wide = found["alike"][:2]
    assert narrow["ratio"] > 1.3 and narrow["steps shared"] < narrow["steps"]
    assert narrow["tokens told"] > 0
    # nothing has finished when all prompts have a slot from the start
    assert wide["ratio"] == 1 and wide["tokens told"] == 0
    assert wide["tau"] < narrow["shared"]
    # prompts that have nothing in common
    assert [r["ratio"] for r in found["apart"]] == [1, 1, 1, 1]


def test_files_in_one_call(tmp_path, capsys):
    # a sample's key is that of its prompt, so no two files may hold one
    paths = [
        str(trace_file(tmp_path / f"{n}.jsonl", {"prompt_ids": [n], "samples": [[5, 6, 7, 8] * 3]}))
        for n in (60, 61)
    ]
    share_call.main([*paths, "--slots", "1", "--samples", "1", "--together-files"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    both = rows["60 and 61"][0]
    assert both["prompts"] == 2 and both["ratio"] > 1
    assert rows["60"][0]["ratio"] == rows["61"][0]["ratio"] == 1
