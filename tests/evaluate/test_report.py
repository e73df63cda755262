"""The report's figures, and its page in a browser without a network."""

import json
import re
import shutil

import pytest
from targets import slow

from csd.cli.main import main
from csd.evaluate.report import data, figures, page
from csd.evaluate.vote import Decision

TEXT = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [1, 2, 5]]


def test_samples_diverge_where_their_tokens_do():
    nodes = data.divergence(TEXT)
    found = {(n["start"], n["end"], tuple(n["samples"])) for n in nodes}
    assert found == {
        (0, 2, (0, 1, 2, 3)),
        (2, 3, (0, 2)),
        (3, 4, (0,)),
        (3, 5, (2,)),
        (2, 3, (1, 3)),
    }
    assert nodes[0]["parent"] == -1
    for node in nodes[1:]:
        parent = nodes[node["parent"]]
        assert parent["end"] == node["start"]
        assert {*node["samples"]} < {*parent["samples"]}
    assert data.alone_from(TEXT) == [3, None, 3, None]


def test_a_sample_that_ends_where_others_go_on():
    nodes = data.divergence([[1], [1, 2]])
    assert [(n["start"], n["end"], n["samples"]) for n in nodes] == [
        (0, 1, [0, 1]), (1, 1, [0]), (1, 2, [1]),
    ]  # fmt: skip
    assert data.divergence([[]])[0]["end"] == 0


def test_tokens_per_step_by_source():
    result = {"steps": [[1, 1, 2], [1, 3]], "sources": [["own", "", ""], ["sibling", ""]]}
    assert data.tokens_per_step(result) == {
        "live": [2, 1, 1],
        "sampled": [1, 1, 1],
        "own": [1, 0, 0],
        "sibling": [1, 0, 0],
        "prompt": [0, 0, 0],
        "history": [0, 0, 0],
    }


def test_draft_model_tokens_are_a_series_of_their_own():
    result = {"steps": [[1, 1, 2]], "sources": [["model", "", ""]]}
    assert data.tokens_per_step(result)["model"] == [1, 0]
    assert figures.steps(result) == {
        "live": [1, 1], "sources": {"sampled": [1, 1], "model": [1, 0]}
    }  # fmt: skip


def test_answers_are_in_the_order_of_their_votes():
    long = "x" * 600
    found = figures.votes(Decision(long + "1", 2, 3, [None, long + "2", long + "1", long + "1"]))
    assert [(v["samples"], v["voted"]) for v in found] == [
        ([2, 3], True), ([1], False), ([0], False)
    ]  # fmt: skip
    assert found[2]["answer"] is None
    # where two answers lead, none is marked
    tied = Decision("1", 1, 2, ["1", "2"], second=1)
    assert not any(v["voted"] for v in figures.votes(tied))


def test_boxes_of_shared_runs_do_not_overlap():
    pieces = {str(i): f"{i} " for i in range(9)}
    boxes = figures.divergence({"tokens": TEXT, "pieces": pieces})
    cells = [
        (row, token)
        for b in boxes
        for row in range(b["row"], b["row"] + b["rows"])
        for token in range(b["start"], b["end"])
    ]
    assert len(cells) == len({*cells}) == sum(map(len, TEXT))
    assert max(b["row"] + b["rows"] for b in boxes) == 4
    assert all(b["rows"] == len(b["samples"]) for b in boxes)


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
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Seen:
    """Requests of a page to the network, and its errors."""

    def __init__(self, browser, path, width=1400, scheme="light"):
        self.errors, self.requests = [], []
        # the machine may have a network: the page must not
        self.context = browser.new_context(
            offline=True, viewport={"width": width, "height": 1000}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(path.as_uri())


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


# measured on the page: width, height and left edge of what is named
BOXES = "(q) => [...document.querySelectorAll(q)].map(e => { const b = e.getBoundingClientRect(); \
return [b.left, b.top, b.width, b.height]; })"


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
        r"tokens a step, \d+ tokens a second, [\d.]+ s", shown.locator("h1").inner_text()
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


class Bytes:
    """A tokenizer of a byte a token."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


@slow
def test_a_character_of_several_tokens_is_shown_whole():
    from csd.engine.result_json import characters

    tokens = list("aé😀!é".encode())[:-1]
    pieces = {t: Bytes().decode([t]) for t in tokens}
    found = characters(Bytes(), tokens, pieces)
    # the last one was cut off
    assert found == {1: "", 2: "é", 3: "", 4: "", 5: "", 6: "😀"}
    result = {"tokens": [tokens], "pieces": {str(t): p for t, p in pieces.items()},
              "characters": [{str(i): t for i, t in found.items()}]}  # fmt: skip
    assert data.text_between(result, 0, 0, len(tokens)) == "aé😀!\ufffd"
    assert data.text_between(result, 0, 3, 7) == "😀"
