"""The page at / in headless Chromium, while samples are drawn."""

import pytest
from helpers.chromium import chromium
from helpers.runs.served import opened, served

import csd
from csd.models.demo import toy

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def test_the_page_shows_what_is_drawn(browser):
    from playwright.sync_api import expect

    model, tokenizer = toy()
    engine = csd.Engine(model, tokenizer=tokenizer, max_slots=4)
    with served(csd.AsyncEngine(engine, max_tokens=8000, budget=0), keys=("k",)) as (port, _):
        page = browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#state")).to_contain_text("API key")
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/#k")
        expect(page.locator("#state")).to_have_text("idle")
        body = {"prompt": "ab", "n": 6, "max_tokens": 7000, "ignore_eos": True, "stream": True}
        stream = opened(port, "/v1/completions", body, "k")
        expect(page.locator("#slots")).to_have_text("4 / 4")
        expect(page.locator("#state")).to_have_text("drawing")
        expect(page.locator("#tau")).to_have_text("1.00")
        page.wait_for_function("Number(document.getElementById('rate').textContent) > 10")
        page.wait_for_function(
            "document.getElementById('line').getAttribute('points').split(' ').length > 2"
        )
        stream.close()
        expect(page.locator("#state")).to_have_text("idle", timeout=15_000)
        assert not errors
