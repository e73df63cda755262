"""The page of an evaluation."""

import json
import re
from pathlib import Path

import pytest
from helpers.chromium import Seen

from csd.cli.main import main
from csd.evaluate.report import eval_page


def test_a_report_of_an_evaluation(place, browser, toy_folder):
    problems = place / "problems.jsonl"
    problems.write_text('{"prompt": "<b>a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    out = place / "results.jsonl"
    command = ["eval", str(problems), "--model", toy_folder, "-n", "4", "--max-new-tokens", "12"]
    assert main([*command, "--budget", "4", "-o", str(out), "--quiet"]) == 0
    assert main(["report", str(out), "-o", str(place / "results.html")]) == 0
    drawn = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    for width in (1200, 390):
        seen = Seen(browser, place / "results.html", width=width)
        assert "2 problems, 4 samples each" in seen.page.locator("h1").inner_text()
        # the last row has all samples
        cells = seen.page.locator("table tr:last-child td").all_inner_texts()
        each = f"{sum(row['tokens'] for row in drawn) / 2:,.0f}"
        assert cells[3] == each
        assert re.fullmatch(r"[\d.]+% \([\d.]+% to [\d.]+%\)", cells[1])
        assert seen.page.locator("dd").first.inner_text() == Path(toy_folder).name
        assert seen.page.locator("table tr").count() == 4
        assert seen.page.locator("details").count() == 2
        assert seen.page.locator("details pre").count() == 8
        assert seen.page.locator(".question").all_inner_texts() == ["<b>a", "b"]
        firsts = seen.page.locator("table td:first-child").all_inner_texts()
        assert firsts == ["1", "2", "4"]
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        # the table fits
        assert seen.page.locator(".scroll").evaluate_all(
            "e => e.every(x => x.scrollWidth <= x.clientWidth + 1)"
        )
        assert seen.errors == []
        seen.context.close()


@pytest.mark.parametrize(
    ("reasons", "title"),
    [
        (["length"] * 2, "no answers (all 4 samples were cut at the limit), "),
        (["length", "stop"], "no answers (2 of 4 samples were cut at the limit), "),
        (["stop"] * 2, "2 samples each: no answers, "),
    ],
)
def test_an_evaluation_without_answers_has_no_accuracy_in_its_title(reasons, title):
    row = dict(
        problem=0,
        answer="1",
        vote=None,
        vote_correct=False,
        answers=[None] * 2,
        correct=[False] * 2,
        finish_reasons=reasons,
        texts=[""] * 2,
        tokens=8,
        steps=8,
        seconds=1.0,
    )
    settings = {"num_samples": 2, "model": "/folder/a <b>.gguf"}
    text = eval_page(settings, [row, row | {"problem": 1}])
    headline = re.search("<h1>(.*)</h1>", text)[1]
    assert title in headline and "%" not in headline
    assert "<dd>a &lt;b&gt;.gguf</dd>" in text
    # a measurement of all samples, of which k have their tokens' share
    assert "<th>seconds<br>per problem</th>" in text and "k samples alone take longer" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_json_is_printed_to_programs_and_not_on_a_terminal(
    tmp_path, capsys, monkeypatch, toy_folder, terminal
):
    problems, out = tmp_path / "problems.jsonl", tmp_path / "results.jsonl"
    problems.write_text('{"prompt": "a", "answer": "1"}\n')
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    command = ["eval", str(problems), "--model", toy_folder, "-n", "2", "--max-new-tokens", "4"]
    assert main([*command, "--budget", "4", "-o", str(out), "--quiet"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    assert (printed.out == "") if terminal else json.loads(printed.out) == summary
    assert "maj@k" in printed.err
