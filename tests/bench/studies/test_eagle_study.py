"""`python -m bench eagle` and `eagle_head` on a toy."""

import json
from argparse import Namespace

import pytest
from helpers.runs.trace_file import trace_file

import csd
from bench.studies.eagle import eagle, eagle_head, eagle_tables
from csd.models.demo import toy

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A toy's folder, a file of problems, and the result of training on some of them."""
    folder = tmp_path_factory.mktemp("eagle")
    for part in toy():
        part.save_pretrained(folder / "model")
    words = folder / "words.jsonl"
    words.write_text("".join(json.dumps({"question": f"{i} + {i}?"}) + "\n" for i in range(9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle_head, "smollm2_path", lambda: str(folder / "model"))
        patch.setattr(eagle_head, "PROBLEMS", 6)
        patch.setattr(eagle_head, "PARTS", 3)
        rows = [{"prompt_ids": [i, 7], "samples": [[i, 5, 9]] * 3} for i in range(4)]
        patch.setattr(eagle_head, "OURS", trace_file(folder / "ours.jsonl", *rows))
        patch.setattr(eagle_head, "SAMPLES", 2)
        patch.setattr(eagle_head, "SAMPLING", eagle_head.SAMPLING | {"max_new_tokens": 8})
        out, result = str(folder / "out"), str(folder / "head.json")
        more = str(trace_file(folder / "more.jsonl", {"prompt_ids": [8], "samples": [[9, 9]]}))
        eagle_head.main([str(words), "-o", out, "--parts", "2", "--traces", more, "--json", result])
    csd.release()
    return folder


def test_the_parts_of_the_problems_are_drawn_and_learnt(place):
    result = json.loads((place / "head.json").read_text())
    # one of a file, every third of six problems, twice, and two samples of four prompts of ours
    assert (result["prompts"], result["samples"]) == (1 + 4 + 4, 1 + 8 + 8)
    asked = (place / "out" / "gsm8k-01.prompts.jsonl").read_text()
    assert [json.loads(x)["question"] for x in asked.splitlines()] == ["1 + 1?", "4 + 4?"]
    assert result["curve"][-1]["acceptance"] is not None
    assert result["bytes"] == (place / "out" / "head" / "model.safetensors").stat().st_size


def test_every_drafter_commits_the_same_tokens(place, monkeypatch):
    model, tokenizer = toy()
    monkeypatch.setattr(eagle, "CELLS", [(1, 0.0, 4), (2, 0.7, 4)])
    args = Namespace(
        head=place / "out" / "head",
        datastore=place / "out" / "traces.jsonl",
        samples=[1, 2],
        nodes=[4],
        drafters=eagle.DRAFTERS,
        tokens=12,
        k=2,
        depth=3,
    )
    prompts = {"word problems": eagle.problems_of(place / "words.jsonl", 6, 2)}
    assert [p[0]["content"] for p in prompts["word problems"]] == ["6 + 6?", "7 + 7?"]
    with csd.Engine(model, tokenizer=tokenizer) as engine:
        rows = [*eagle.measured(engine, prompts, args)]
    assert len(rows) == 2 * len(eagle.DRAFTERS)
    for n in (1, 2):
        assert len({tuple(r["tokens"]) for r in rows if r["samples"] == n}) == 1
    for r in rows:
        assert sum(r["tokens"]) >= sum(r["steps"]) > 0
        # each step commits a token beside those that were drafted
        assert sum(r["accepted"]) <= sum(r["tokens"]) - sum(r["steps"]) + 2 * r["samples"]
    figures, pooled = eagle_tables.tables({"rows": [r | {"load": 0.0} for r in rows]}, times=True)
    assert figures.count("\n") == 1 + len(rows) and pooled.count("\n") == 3
    assert "draft, ms" in figures and "draft, ms" not in eagle_tables.tables({"rows": rows})[0]


def test_the_plot_has_the_curve_and_a_bar_for_each_drafter(place, capsys):
    rows = [
        dict(
            task=task,
            samples=n,
            temperature=0.7,
            nodes=nodes,
            drafter=d,
            tokens=[6],
            steps=[3],
            accepted=[1],
            proposed=[9],
        )
        for task in ("word problems", "MATH")
        for n in (1, 8)
        for d in ("eagle", "rest")
        for nodes in (16, 60)
    ]
    (place / "eagle.json").write_text(json.dumps({"rows": rows}))
    asked = ["--table", str(place / "eagle.json"), "--plot", str(place / "eagle.svg")]
    eagle.main([*asked, "--trained", str(place / "head.json")])
    assert capsys.readouterr().out.count("word problems") == 8
    # a bar is a path with a name of its own in matplotlib's file
    picture = (place / "eagle.svg").read_text()
    assert picture.count('<g id="patch_') >= 2 * 2 * 2 and 'id="line2d_' in picture
    with pytest.raises(SystemExit):
        eagle.main(asked)
