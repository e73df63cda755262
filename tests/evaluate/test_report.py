"""The report's figures, and its page in a browser without a network."""

import json
import shutil

import pytest

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
    assert "model" in [trace["name"] for trace in figures.steps(result)["data"]]


def test_answers_that_look_alike_when_cut_have_bars_of_their_own():
    long = "x" * 60
    bar = figures.votes(Decision(long + "1", 2, 3, [long + "1", long + "2", long + "1", None]))
    trace, axis = bar["data"][0], bar["layout"]["yaxis"]
    assert trace["x"] == [2, 1, 1]
    assert len({*trace["y"]}) == 3 and trace["y"] == axis["tickvals"]
    assert [len(t) for t in axis["ticktext"]] == [40, 40, len("no answer")]
    assert trace["customdata"][0] != trace["customdata"][1]


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

    def __init__(self, browser, path):
        self.errors, self.requests = [], []
        # the machine may have a network: the page must not
        self.context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000})
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
    parts = shown.locator(".shares span").all_inner_texts()
    shares = [float(t.split()[-1].rstrip("%")) for t in parts]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares[0] == pytest.approx(100 * colours.count("") / len(colours), abs=0.5)
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
    weights = shown.evaluate("document.getElementById('graph').data[0].link.customdata.map(c => c)")
    drafted = [w for w in weights if "not drafted" not in w[2]]
    assert sum(float(w[0]) for w in drafted) == pytest.approx(
        sum(draft["probabilities"][1:]), abs=0.001 * len(drafted)
    )
    assert sum("accepted" in w[2] for w in drafted) == len(draft["path"])
    # all samples of the step, merged
    shown.select_option("#of", "all")
    weights = shown.evaluate("document.getElementById('graph').data[0].link.customdata.map(c => c)")
    at_step = [d for s in run["drafts"] for d in s if d["step"] == draft["step"]]
    assert sum(float(w[0]) for w in weights if "not drafted" not in w[2]) == pytest.approx(
        sum(sum(d["probabilities"][1:]) for d in at_step), abs=0.001 * len(weights)
    )
    # plotly fades the links of before out
    expect(shown.locator("#graph .sankey-link")).to_have_count(len(weights))

    # the charts are drawn
    bars = shown.evaluate(
        "document.getElementById('steps').data.filter(t => t.type == 'bar').map(t => t.y)"
    )
    committed = sum(map(len, run["steps"]))
    live = shown.evaluate(
        "document.getElementById('steps').data.find(t => t.name == 'samples in flight').y"
    )
    total = sum(b * n for ys in bars for b, n in zip(ys, live, strict=True))
    assert total == pytest.approx(committed)
    slices = shown.locator("#divergence .slice").count()
    assert slices == len(data.divergence(run["tokens"]))
    votes = shown.evaluate("document.getElementById('votes').data[0].x")
    assert sum(votes) == 4
    assert shown.locator("#votes .point").count() == len(votes)

    assert seen.errors == []
    assert [r for r in seen.requests if not r.startswith(("file:", "data:", "blob:"))] == []
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
    for name, title in [("two", "2 samples of one prompt"), ("one", "1 sample, 1.00 tokens")]:
        seen = Seen(browser, place / f"{name}.html")
        assert title in seen.page.locator("h1").inner_text()
        assert seen.errors == []
        assert ("Nothing was drafted" in seen.page.locator(".lead").inner_text()) is (name == "one")
        seen.context.close()


class Bytes:
    """A tokenizer of a byte a token."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_shown_whole():
    from csd.engine.result import characters

    tokens = list("aé😀!é".encode())[:-1]
    pieces = {t: Bytes().decode([t]) for t in tokens}
    found = characters(Bytes(), tokens, pieces)
    # the last one was cut off
    assert found == {1: "", 2: "é", 3: "", 4: "", 5: "", 6: "😀"}
    result = {"tokens": [tokens], "pieces": {str(t): p for t, p in pieces.items()},
              "characters": [{str(i): t for i, t in found.items()}]}  # fmt: skip
    assert data.text_between(result, 0, 0, len(tokens)) == "aé😀!\ufffd"
    assert data.text_between(result, 0, 3, 7) == "😀"
