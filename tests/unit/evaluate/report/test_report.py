"""The report's page in a browser without a network."""

import json

import pytest
from helpers.chromium import Seen

from csd.cli.main import main
from csd.evaluate.report import data, page


def test_errors_are_one_line(place, capsys):
    (place / "other.json").write_text('{"texts": []}')
    assert main(["report", str(place / "other.json")]) == 2
    message = "expected the object of csd sample --json, which must have 'tokens'"
    assert message in capsys.readouterr().err
    (place / "broken.json").write_text("{")
    assert main(["report", str(place / "broken.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err


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
    legend = shown.locator(".shares + .legend li").all_inner_texts()
    shares = [float(t.split()[-1].rstrip("%")) for t in legend]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares[0] == pytest.approx(100 * colours.count("") / len(colours), abs=0.5)
    assert min(shares) > 0

    assert "</script><b>7 & 7</b>" in shown.locator("pre").text_content()

    steps = max(s[-1] for s in run["steps"])
    assert shown.locator("#step").get_attribute("max") == str(steps)

    # played, tokens of later steps are not there yet; a click shows all of them again
    shown.evaluate(
        "e => { e.value = 3; e.dispatchEvent(new Event('input')); }",
        shown.locator("#step").element_handle(),
    )
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
    live = data.steps(run)["live"]
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
    "</script><script>window.hostile = 1</script>",
    "<img src=x onerror='window.hostile=1'>",
    "&lt;b&gt;",
    "%{y}",
    "$x^2$",
    "<!--",
    "שלום ",
    "مرحبا",
    "👩‍👧 ",
    "\u2028",
    "\\",
    "${run}",
    "]]>",
]


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
    for name, title in [
        ("two", "2 samples of one prompt"),
        ("one", f"1 sample: {run['stats']['tokens']:,} tokens, "),
    ]:
        seen = Seen(browser, place / f"{name}.html")
        assert title in seen.page.locator("h1").inner_text()
        assert seen.errors == []
        assert ("Nothing was drafted" in seen.page.locator(".lead").inner_text()) is (name == "one")
        seen.context.close()
