"""The report's page in a browser without a network."""

import json
import re

import pytest
from chromium import BOXES, Seen, chromium

from csd.cli.main import main
from csd.evaluate.report import data, page


@pytest.fixture(scope="module")
def place(tmp_path_factory, toy_folder):
    """A folder with what `csd sample --json` printed, of a run whose prompt is HTML."""
    import contextlib
    import io

    import csd

    folder = tmp_path_factory.mktemp("report")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(
            ["sample", toy_folder, "</script><b>7 & 7</b>", "-n", "4", "--max-new-tokens",
             "40", "--temperature", "0.4", "--seed", "1", "--budget", "16", "--json", "--drafts"]
        )  # fmt: skip
    csd.release()
    assert code == 0
    (folder / "out.json").write_text(printed.getvalue())
    return folder


def test_errors_are_one_line(place, capsys):
    (place / "other.json").write_text('{"texts": []}')
    assert main(["report", str(place / "other.json")]) == 2
    message = "expected the object of csd sample --json, which must have 'tokens'"
    assert message in capsys.readouterr().err
    (place / "broken.json").write_text("{")
    assert main(["report", str(place / "broken.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_the_page_in_chromium(place, browser):
    assert main(["report", str(place / "out.json"), "-o", str(place / "out.html")]) == 0
    from playwright.sync_api import expect

    run = json.loads((place / "out.json").read_text())
    seen = Seen(browser, place / "out.html")
    shown = seen.page

    # the samples side by side, every token with its source
    boxes = shown.locator(".sample")
    assert boxes.count() == 4
    for i, tokens in enumerate(run["tokens"]):
        spans = boxes.nth(i).locator("b")
        assert spans.count() == len(tokens)
        titles = spans.evaluate_all("e => e.map(x => x.title.split(',')[0])")
        assert titles == [s or "sampled" for s in run["sources"][i]]
        assert spans.evaluate_all("e => e.map(x => x.textContent).join('')") == "".join(
            run["pieces"][str(t)] for t in tokens
        )
    colours = shown.locator(".sample b").evaluate_all("e => e.map(x => x.style.background)")
    assert len(set(colours)) >= 3
    # what was not drafted has no colour
    assert colours.count("") == sum(s.count("") for s in run["sources"])
    stats = run["stats"]
    lead = shown.locator(".lead").inner_text()
    accepted = f"{stats['nodes_accepted']} of {stats['nodes_proposed']} drafted tokens"
    assert f"{accepted} were accepted" in lead
    legend = shown.locator(".legend li").all_inner_texts()
    shares = [float(t.split()[-1].rstrip("%")) for t in legend]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares[0] == pytest.approx(100 * colours.count("") / len(colours), abs=0.5)
    assert min(shares) > 0

    assert "</script><b>7 & 7</b>" in shown.locator("pre").text_content()

    steps = max(s[-1] for s in run["steps"])
    assert shown.locator("#step").get_attribute("max") == str(steps)

    # played, tokens of later steps are not there yet; a click shows all of them again
    shown.evaluate("e => { e.value = 3; e.dispatchEvent(new Event('input')); }",
                   shown.locator("#step").element_handle())  # fmt: skip
    later = sum(step > 3 for sample in run["steps"] for step in sample)
    assert shown.locator(".sample b.later").count() == later > 0
    shown.locator("#play").click()
    expect(shown.locator("#step-shown")).not_to_have_text("3")

    # a click shows the step that committed the token
    sample = 2
    drafts = run["drafts"][sample]
    draft = max(drafts, key=lambda d: (len(d["path"]), len(d["tokens"])))
    assert draft["path"]
    boxes.nth(sample).locator("b").nth(draft["at"]).click()
    assert shown.locator("#step-shown").inner_text() == str(draft["step"])
    assert shown.locator(".sample b.later").count() == 0
    assert "play" in shown.locator("#play").inner_text()
    chosen = boxes.nth(sample).locator("b.chosen")
    assert chosen.count() == run["steps"][sample].count(draft["step"])
    links = links_of(shown)
    drafted = [w for w, fate in links if fate != "sampled, not drafted"]
    assert sum(drafted) == pytest.approx(sum(draft["probabilities"][1:]))
    assert sum("accepted" in fate for _, fate in links) == len(draft["path"])
    # all samples of the step, merged
    shown.select_option("#of", "all")
    links = links_of(shown)
    at_step = [d for s in run["drafts"] for d in s if d["step"] == draft["step"]]
    assert sum(w for w, fate in links if fate != "sampled, not drafted") == pytest.approx(
        sum(sum(d["probabilities"][1:]) for d in at_step)
    )

    # the charts are drawn
    committed = sum(map(len, run["steps"]))
    live = data.tokens_per_step(run)["live"]
    bars = shown.locator("#steps rect").evaluate_all(
        "e => e.map(x => [Number(x.dataset.step), Number(x.dataset.value)])"
    )
    assert sum(value * live[step - 1] for step, value in bars) == pytest.approx(committed)
    assert shown.locator("#divergence .slice").count() == len(data.divergence(run["tokens"]))
    votes = shown.locator("#votes .vote").evaluate_all("e => e.map(x => Number(x.dataset.samples))")
    assert sum(votes) == 4

    assert seen.errors == []
    assert [r for r in seen.requests if not r.startswith(("file:", "data:", "blob:"))] == []
    seen.context.close()


def links_of(shown):
    """Weight and fate of each band of the graph."""
    return shown.locator("#graph path").evaluate_all(
        "e => e.map(x => [Number(x.dataset.weight), x.dataset.fate])"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_at_two_widths_in_two_schemes(place, browser, width, scheme):
    assert main(["report", str(place / "out.json"), "-o", str(place / "out.html")]) == 0
    assert (place / "out.html").stat().st_size < 1_000_000
    run = json.loads((place / "out.json").read_text())
    seen = Seen(browser, place / "out.html", width=width, scheme=scheme)
    shown = seen.page
    # shares to scale
    counts = [n for n in (run["stats"]["tokens"] - run["stats"]["nodes_accepted"],
                          *run["stats"]["accepted"].values()) if n]  # fmt: skip
    parts = shown.evaluate(BOXES, ".shares span")
    bar = sum(w for _, _, w, _ in parts)
    assert sorted(w / bar for _, _, w, _ in parts) == pytest.approx(
        sorted(n / sum(counts) for n in counts), abs=0.01
    )
    # nothing is wider than the page, whose charts stand beside or below each other
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    steps, votes = (shown.evaluate(BOXES, f"#{name}")[0] for name in ("steps", "votes"))
    below = votes[1] >= steps[1] + steps[3]
    assert below == (width == 390) and steps[2] > (0.85 if below else 0.5) * (width - 60)
    # boxes of the shared runs lie within their chart, as wide as their tokens
    (left, top, wide, high), boxes = shown.evaluate(BOXES, "#divergence")[0], data.divergence(
        run["tokens"])  # fmt: skip
    last = max(map(len, run["tokens"]))
    for (x, y, w, h), node in zip(shown.evaluate(BOXES, ".slice"), boxes, strict=True):
        assert (
            x >= left - 1 and y >= top - 1 and x + w <= left + wide + 1 and y + h <= top + high + 1
        )
        assert w == pytest.approx(wide * (node["end"] - node["start"]) / last, abs=1)
    # text is darker than the page in the one, lighter in the other
    colours = shown.evaluate(
        "[getComputedStyle(document.body).color, \
getComputedStyle(document.body).backgroundColor]"
    )
    text, ground = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours)
    assert (text < ground) == (scheme == "light") and abs(text - ground) > 450
    # what was accepted most is open
    best = max(
        ((sum(1 if s else 0.01 for sample, steps in zip(run["sources"], run["steps"], strict=True)
              for s, at in zip(sample, steps, strict=True) if at == step)), -step)
        for step in {s for steps in run["steps"] for s in steps}
    )  # fmt: skip
    assert shown.locator("#step-shown").inner_text() == str(-best[1])
    assert re.search(
        r"tokens per step, \d+ tokens per second, [\d.]+ s", shown.locator("h1").inner_text()
    )
    assert seen.errors == []
    seen.context.close()


def test_a_report_of_an_evaluation(place, browser, toy_folder):
    problems = place / "problems.jsonl"
    problems.write_text('{"prompt": "<b>a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    out = place / "results.jsonl"
    command = ["eval", str(problems), "--model", toy_folder, "-n", "4", "--max-new-tokens", "12"]
    assert main([*command, "--budget", "4", "-o", str(out), "--quiet"]) == 0
    assert main(["report", str(out), "-o", str(place / "results.html")]) == 0
    for width in (1200, 390):
        seen = Seen(browser, place / "results.html", width=width)
        assert "2 problems, 4 samples each" in seen.page.locator("h1").inner_text()
        assert seen.page.locator("table tr").count() == 4
        assert seen.page.locator("details").count() == 2
        assert seen.page.locator("details pre").count() == 8
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.errors == []
        seen.context.close()


def test_runs_without_drafts_name_the_flag(place, browser):
    run = json.loads((place / "out.json").read_text())
    del run["drafts"]
    (place / "plain.html").write_text(page(run), "utf-8")
    seen = Seen(browser, place / "plain.html")
    assert "csd sample --json --drafts" in seen.page.locator("#graph").inner_text()
    assert seen.page.locator(".sample").count() == 4
    assert seen.errors == []
    seen.context.close()


HOSTILE = [
    "</script><script>window.hostile = 1</script>", "<img src=x onerror='window.hostile=1'>",
    "&lt;b&gt;", "%{y}", "$x^2$", "<!--",
    "שלום ", "مرحبا", "👩‍👧 ", "\u2028", "\\", "${run}", "]]>",
]  # fmt: skip


def test_token_texts_are_escaped(place, browser):
    run = json.loads((place / "out.json").read_text())
    used = sorted({t for tokens in run["tokens"] for t in tokens})
    for i, token in enumerate(used):
        run["pieces"][str(token)] = HOSTILE[i % len(HOSTILE)]
    run["prompt"] = run["model"] = "".join(HOSTILE)
    run["texts"] = [f"The answer is {HOSTILE[i]}" for i in range(4)]
    (place / "hostile.html").write_text(page(run), "utf-8")
    seen = Seen(browser, place / "hostile.html")
    for i, tokens in enumerate(run["tokens"]):
        spans = seen.page.locator(".sample").nth(i).locator("b")
        assert spans.evaluate_all("e => e.map(x => x.textContent)") == [
            run["pieces"][str(t)] for t in tokens
        ]
    assert seen.page.locator("pre").text_content() == run["prompt"]
    for step in (1, max(s[-1] for s in run["steps"])):
        seen.page.evaluate(f"choose({step}, 'all', false)")
    assert seen.page.evaluate("window.hostile") is None
    assert seen.errors == []
    seen.context.close()


def test_one_sample_and_a_cancelled_one_without_tokens(place, browser):
    run = json.loads((place / "out.json").read_text())
    lists = [key for key, value in run.items() if isinstance(value, list) and key != "prompt_ids"]
    empty = {"texts": None, "characters": {}, "finish_reasons": "cancelled"}
    for key in lists:
        assert len(run[key]) == 4
        run[key] = [run[key][0], empty.get(key, [])]
    (place / "two.html").write_text(page(run), "utf-8")
    for key in lists:
        run[key] = run[key][:1]
    run["stats"] |= dict(nodes_proposed=0, nodes_accepted=0, tokens_per_step=1.0)
    (place / "one.html").write_text(page(run), "utf-8")
    for name, title in [("two", "2 samples of one prompt"), ("one", "1 sample: 1.00 tokens")]:
        seen = Seen(browser, place / f"{name}.html")
        assert title in seen.page.locator("h1").inner_text()
        assert seen.errors == []
        assert ("Nothing was drafted" in seen.page.locator(".lead").inner_text()) is (name == "one")
        seen.context.close()
