"""Layout of the report on a screen and on a phone: texts, boxes and legends that are visible."""

import json
import re

import pytest
from helpers.chromium import BOXES, Seen

from csd.cli.main import main
from csd.evaluate.report import data, page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_at_two_widths_in_two_schemes(place, browser, width, scheme):
    assert main(["report", str(place / "out.json"), "-o", str(place / "out.html")]) == 0
    assert (place / "out.html").stat().st_size < 1_000_000
    run = json.loads((place / "out.json").read_text())
    seen = Seen(browser, place / "out.html", width=width, scheme=scheme)
    shown = seen.page
    # shares to scale
    counts = [
        n
        for n in (
            run["stats"]["tokens"] - run["stats"]["nodes_accepted"],
            *run["stats"]["accepted"].values(),
        )
        if n
    ]
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
    # the bars of the shared runs lie within their chart, as wide as their tokens
    (left, top, wide, high), boxes = (
        shown.evaluate(BOXES, "#divergence")[0],
        data.divergence(run["tokens"]),
    )
    last = max(map(len, run["tokens"]))
    for (x, y, w, h), node in zip(shown.evaluate(BOXES, ".track i"), boxes, strict=True):
        assert (
            x >= left - 1 and y >= top - 1 and x + w <= left + wide + 1 and y + h <= top + high + 1
        )
        assert w == pytest.approx(wide * (node["end"] - node["start"]) / last, abs=1)
        assert x - left == pytest.approx(wide * node["start"] / last, abs=1)
    # every area and line of a chart has its swatch
    entries = shown.locator(".legend li").all()
    assert len(entries) == len(counts) * 2 + 1
    for entry in entries:
        swatch = entry.locator("i").bounding_box()
        assert swatch["width"] >= 8 and swatch["height"] >= 2
    assert "samples in flight" in entries[-1].inner_text()
    assert "samples in flight" in shown.locator("#steps text.label").all_text_contents()
    # text is darker than the page in the one, lighter in the other
    colours = shown.evaluate(
        "[getComputedStyle(document.body).color, \
getComputedStyle(document.body).backgroundColor]"
    )
    text, ground = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours)
    assert (text < ground) == (scheme == "light") and abs(text - ground) > 450
    # what was accepted most is open
    best = max(
        (
            (
                sum(
                    1 if s else 0.01
                    for sample, steps in zip(run["sources"], run["steps"], strict=True)
                    for s, at in zip(sample, steps, strict=True)
                    if at == step
                )
            ),
            -step,
        )
        for step in {s for steps in run["steps"] for s in steps}
    )
    assert shown.locator("#step-shown").inner_text() == str(-best[1])
    assert re.search(
        r"tokens per step of a sample, \d+ tokens per second, [\d.]+ s",
        shown.locator("h1").inner_text(),
    )
    assert seen.errors == []
    seen.context.close()


# texts whose boxes overlap a box that they are no part of
OVERLAPS = """([texts, others]) => {
  const boxes = (q) => [...document.querySelectorAll(q)].map(
    (e) => [e, e.getBoundingClientRect()]);
  const apart = (p, q) => p.left >= q.right - 0.5 || q.left >= p.right - 0.5 ||
    p.top >= q.bottom - 0.5 || q.top >= p.bottom - 0.5;
  return boxes(texts).flatMap(([a, p]) => boxes(others)
    .filter(([b, q]) => a !== b && !b.contains(a) && !apart(p, q))
    .map(([b]) => `${a.textContent} | ${b.textContent}`));
}"""


@pytest.mark.parametrize("width", [1200, 390])
def test_texts_are_not_drawn_over(place, browser, width):
    run = json.loads((place / "out.json").read_text())
    (place / "texts.html").write_text(page(run), "utf-8")
    seen = Seen(browser, place / "texts.html", width=width)
    shown = seen.page
    assert shown.evaluate(OVERLAPS, [".slice .words", ".slice, .slice .words"]) == []
    steps = sorted({d["step"] for drafts in run["drafts"] for d in drafts})
    for step in steps[:: max(1, len(steps) // 6)]:
        shown.evaluate(f"choose({step}, 'all', false)")
        assert shown.evaluate(OVERLAPS, ["#graph text", "#graph path, #graph text"]) == []
        # a name and its number are within their box
        for x, name, number, right in shown.locator("#graph g").evaluate_all(
            "e => e.map(g => [...g.querySelectorAll('rect, text')].map(x => "
            "x.getBoundingClientRect())).map(([r, a, b]) => [r.left, a.left, b.right, r.right])"
        ):
            assert x < name and number < right
    # what is cut has an ellipsis, and its whole text as a title and after a click
    lines = shown.locator(".slice")
    for i, node in enumerate(data.divergence(run["tokens"])):
        whole = data.text_between(run, node["samples"][0], node["start"], node["end"])
        assert whole in lines.nth(i).get_attribute("title")
    assert lines.locator(".words").evaluate_all(
        "e => e.every(x => Number(getComputedStyle(x).webkitLineClamp) > 0)"
    )
    cut = "e => e.filter(x => x.scrollHeight > x.clientHeight + 1).length"
    assert lines.locator(".words").evaluate_all(cut) > 0 or width == 1200
    lines.evaluate_all("e => e.forEach(x => x.click())")
    assert lines.locator(".words").evaluate_all(cut) == 0
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    seen.context.close()


def test_a_clipped_box_has_a_notice(place, browser):
    run = json.loads((place / "out.json").read_text())
    for key, value in run.items():
        if isinstance(value, list) and key != "prompt_ids":
            run[key] = value * 10
    (place / "many.html").write_text(page(run), "utf-8")
    for width in (1200, 390):
        seen = Seen(browser, place / "many.html", width=width)
        shown = seen.page
        shown.wait_for_timeout(100)
        for box in ("#samples", "#graph", ".sample p:not(.sign)"):
            for hidden, larger in shown.locator(box).evaluate_all(
                "e => e.map(x => [x.nextElementSibling.hidden, x.scrollHeight > x.clientHeight + 1 "
                "|| x.scrollWidth > x.clientWidth + 1])"
            ):
                assert hidden is not larger
        sign = shown.locator("#samples + .sign")
        assert sign.is_visible() == (width == 1200)
        if width == 1200:
            assert "all 40 samples" in sign.inner_text()
        else:
            # on a phone no sample is within a box that scrolls
            _, top, _, high = shown.evaluate(BOXES, "#samples")[0]
            assert all(
                y >= top and y + h <= top + high + 1
                for _, y, _, h in shown.evaluate(BOXES, ".sample")
            )
            shown.evaluate("choose(1, 'all', false)")
        assert seen.errors == []
        seen.context.close()
