"""Headless Chromium, and pages in it without a network."""

import shutil
from contextlib import contextmanager

import pytest


@contextmanager
def chromium():
    """A browser while the block runs; the test is skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


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


# measured on the page: width, height and left edge of what is named
BOXES = "(q) => [...document.querySelectorAll(q)].map(e => { const b = e.getBoundingClientRect(); \
return [b.left, b.top, b.width, b.height]; })"
