"""`python -m bench.long`: the plan, a row, the picture and the table that are made of a file."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import median

import pytest

from bench.e2e import answers
from bench.e2e.long import __main__ as long
from bench.e2e.long import picture, tables
from bench.e2e.long.drawn import Drawn, described, distinct
from bench.e2e.long.plan import CSD, PEERS, TASKS, Cell, plan, supported
from bench.e2e.long.prompts import ITEMS, prompt
from bench.e2e.long.rows import drawn_in_turns
from bench.lib.settings import PLAIN

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[3]
ENGINES = ("csd", "csd without drafts", "vLLM", "llama.cpp", "transformers")


class Tokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, chat, add_generation_prompt):
        assert add_generation_prompt
        return {"input_ids": list(chat[0]["content"].encode())}


class Side:
    """Draws n samples of rising tokens with an end, at so many tokens per second."""

    def __init__(self, speed, log, name):
        self.speed, self.log, self.name = speed, log, name

    def draw(self, ids, n, limit, seed):
        self.log.append((self.name, seed))
        tokens = [[*range(1, limit), 0] for _ in range(n)]
        return Drawn(tokens, [True] * n, n * limit / self.speed, 1.5)


@pytest.fixture(scope="module")
def result():
    """Rows of sides that do not exist, as a run writes them."""
    log, speeds = (
        [],
        {
            "csd": 600.0,
            "csd without drafts": 500.0,
            "vLLM": 400.0,
            "vLLM ngram": 420.0,
            "transformers generate": 100.0,
        },
    )
    sides = {name: Side(speed, log, name) for name, speed in speeds.items()}
    cells = [Cell("one", "worked problems", 8, limit, tuple(speeds)) for limit in (20, 60)]
    cells.append(Cell("one", "programs", 4, 20, CSD))
    rows = [drawn_in_turns(cell, sides, Tokenizer(), 2) for cell in cells]
    machine = {"cores": 2, "cpu": "A <CPU> & more"}
    head = {"bench": "long", "model": "m.gguf", "dtype": "bfloat16", "machine": machine}
    head["left out"] = {"llama.cpp": "llama-cpp-python is not here"}
    return {**head, "rows": rows, "log": log}


def test_a_sample_ends_with_its_first_end_token():
    drawn = Drawn.cut([[5, 6, 0, 7, 0], [5, 6], []], {0}, 2.0)
    assert drawn.tokens == [[5, 6, 0], [5, 6], []] and drawn.ended == [True, False, False]
    assert drawn.rate == 2.5


def test_rows_of_text_that_repeats_or_was_cut_do_not_count():
    fresh, circle = list(range(40)), [1, 2] * 20
    assert distinct([fresh]) == 1.0 and distinct([circle]) == 2 / 33
    # what two samples share is no repetition within one
    assert distinct([fresh, fresh]) == 1.0 and distinct([[1, 2]]) == 1.0
    assert described([fresh] * 2, [True, False])["counts"]
    assert not described([fresh] * 3, [True, False, False])["counts"]
    assert not described([fresh, circle], [True, True])["counts"]


def test_sides_take_turns_and_a_row_has_their_ratios(result):
    row = result["rows"][0]
    names = [name for name, seed in result["log"][:10]]
    assert names[:5] == names[5:][::-1] and names[5:] == list(row["rates"])
    assert row["tok/s"]["csd"] == pytest.approx(600)
    assert row["csd / other"]["vLLM"] == pytest.approx([1.5] * 3)
    assert row["equal samples"] == "16/16" and row["mean length"] == 20 and row["counts"]
    assert json.loads(json.dumps(row)) == row


def test_many_prompts_are_of_all_tasks():
    seen = []

    class Many(Side):
        def draw_all(self, prompts, n, limit, seed):
            seen.append(prompts)
            return self.draw(prompts[0], n * len(prompts), limit, seed)

    sides = {name: Many(100.0, [], name) for name in CSD}
    row = drawn_in_turns(Cell("many", "mixed", 4, 60, slots=16), sides, Tokenizer(), 1)
    assert len(seen) == 2 and seen[0] == seen[1] and len(set(map(tuple, seen[0]))) == 16
    assert row["slots"] == 16 and row["mean length"] == 60


@pytest.mark.parametrize("task", TASKS)
def test_a_longer_limit_asks_for_more(task):
    texts = [prompt(task, limit, 0) for limit in (100, 300, 1000, 3000)]
    asked = [sum(item in text for item in ITEMS[task]()) for text in texts]
    assert asked[0] == asked[1] == 1 < asked[2] < asked[3]
    assert prompt(task, 300, 0) != prompt(task, 300, 1)


def test_the_plan_fits_in_an_hour_and_the_first_rows_have_all_sides():
    cells = plan(full=False, recorded=True)
    assert sum(cell.seconds(3) for cell in cells) < 3000
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[0].sides == (*CSD, *PEERS) and cells[0].limit == 1000
    assert {(c.task, c.samples) for c in cells if c.kind == "one"} >= {
        (task, n) for task in TASKS for n in (4, 8, 16)
    }
    assert {c.slots for c in cells if c.kind == "many"} == {16, 64}
    full = plan(full=True, recorded=False)
    assert {c.sides for c in full if c.kind == "one"} == {(*CSD, *PEERS)}
    assert supported(cells[:1], {"csd", "vLLM"})[0].sides == ("csd", "vLLM")


def test_a_run_goes_on_behind_the_rows_of_its_file(tmp_path, result):
    path, head = tmp_path / "x.json", {"model": "m.gguf", "dtype": "bfloat16", "settings": PLAIN}
    head |= {"sides": {"csd": "1"}, "left out": {"vLLM": "none"}}
    assert long.continued(path, head)["rows"] == []
    path.write_text(json.dumps(result | {"sides": {"vLLM": "2"}, "left out": {}}))
    found = long.continued(path, head)
    assert found["rows"] == result["rows"] and found["left out"] == {}
    assert found["sides"] == {"vLLM": "2", "csd": "1"}
    with pytest.raises(ValueError, match=r"is of model m\.gguf, not another: give another"):
        long.continued(path, head | {"model": "another"})
    with pytest.raises(ValueError, match=r"is of settings .*: give another"):
        long.continued(path, head | {"settings": PLAIN | {"top_k": 20}})


def cells(block):
    """The table's rows as lists, without the line below its head."""
    lines = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    return [lines[0], *lines[2:]]


def test_the_table_is_made_of_the_file(result):
    block = tables.block(result)
    assert block.startswith(tables.BEGIN) and block.endswith(tables.END)
    head, *rows = cells(block)
    # engines that were timed, the fastest first
    assert tuple(row[0] for row in rows) == tuple(name for name in ENGINES if name != "llama.cpp")
    # the longest row, and of an engine's sides the fastest; a file from before settings were
    # recorded
    assert head[0] == "seconds for 8 answers"
    assert head[1].endswith(": 60 tokens, temperature 0.7, no filters")
    assert dict(rows)["vLLM"].startswith("1.1: 1.43 (")
    assert "times as fast as vLLM (ngram); csd without drafts is **" in block
    assert "llama.cpp is left out: llama-cpp-python is not here" in block


def test_a_result_is_a_column(result):
    other = result | {"model": "b.gguf", "settings": PLAIN | {"top_k": 20}}
    (head, *rows), (_, *one) = (
        cells(tables.block(other, result)),
        cells(tables.block(result)),
    )
    assert head[1] == "b: 60 tokens, temperature 0.7, top_k 20"
    assert [row[0] for row in rows] == [row[0] for row in one]
    assert [row[1] for row in rows] == [row[2] for row in rows] == [row[1] for row in one]


def test_printed_ratios_are_the_medians_of_the_pairs_as_on_the_page_of_all_rows():
    for path in ("long.json", "answers.json"):
        result = json.loads((ROOT / "bench/results" / path).read_text())
        row, block = tables.headline(result), tables.block(result)
        sides, (_, *others) = tables.fastest(row), cells(block)[1:]
        assert len(others) > 1
        of_table = {}
        for engine, cell in others:
            _, *of_table[engine] = map(float, re.findall(r"[\d.]+", cell))
            of_page, *_ = row["csd / other"][sides[engine]]
            assert of_table[engine][0] == pytest.approx(of_page, abs=0.006)
            assert of_table[engine][1] <= of_table[engine][0] <= of_table[engine][2]
        whole, engine, drafts = re.search(
            r"^\S+: ([\d.]+) .* \*\*([\d.]+) .* \*\*([\d.]+)", block, re.M
        ).groups()
        peer = next(name for name, _ in others if name != "csd without drafts")
        pairs = zip(row["rates"]["csd without drafts"], row["rates"][sides[peer]], strict=True)
        assert float(whole) == of_table[peer][0]
        assert float(engine) == pytest.approx(median(a / b for a, b in pairs), abs=0.006)
        assert float(drafts) == of_table["csd without drafts"][0]


def test_the_picture_is_made_of_the_file(result):
    text = picture.svg(result)
    root = ET.fromstring(text)
    texts = ["".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"csd", "csd without drafts", "vLLM (ngram)", "0.8", "1.1"} <= set(texts)
    assert "prefers-color-scheme: dark" in text and "llama.cpp" not in texts
    # one bar for each engine, whose length is its seconds
    bars = [float(x.attrib["width"]) for x in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 4 and bars == sorted(bars)
    assert bars[-1] / bars[0] == pytest.approx(6.0, rel=0.01)


def test_one_command_writes_the_page_and_its_plot(result, tmp_path, monkeypatch):
    page, path = tmp_path / answers.PAGE, tmp_path / "answers.json"
    page.parent.mkdir(parents=True)
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    ran = []

    def run(args, cells):
        ran.append((args.pairs, [cell.name for cell in cells]))
        args.json.write_text(json.dumps(result))

    monkeypatch.setattr(answers, "run", run)
    for more in ([], ["--plot"]):
        answers.main(["--json", str(path), *more])
        assert page.read_text() == f"before\n{tables.block(result)}\nafter\n"
        assert path.with_suffix(".svg").read_text() == picture.svg(result)
    second = tmp_path / "answers_coder-1.5b.json"
    second.write_text(json.dumps(result | {"model": "b.gguf", "settings": PLAIN | {"top_k": 20}}))
    answers.main(["--json", str(path), "--plot"])
    files = answers.results(tmp_path)
    assert [*files] == [second, path] and second.with_suffix(".svg").is_file()
    assert page.read_text() == f"before\n{tables.block(*files.values())}\nafter\n"
    assert answers.result_of("coder-1.5b").name == second.name
    assert ran == [(7, ["one worked problems, N=8, limit 1000"])]


def test_the_page_has_the_table_of_the_files():
    page, path = (ROOT / answers.PAGE).read_text(), ROOT / answers.RESULT
    begin, end = (page.index(mark) for mark in (tables.BEGIN, tables.END))
    found = page[begin : end + len(tables.END)]
    rows = answers.results(path.parent)
    assert path in rows and found == tables.block(*rows.values())
    for file, result in rows.items():
        assert picture.svg(result) == file.with_suffix(".svg").read_text()


def test_docs_have_all_rows_of_the_file():
    rows = tables.all_rows(json.loads((ROOT / long.RESULT).read_text()))
    assert rows in (ROOT / "docs/experiments/answers.md").read_text()
