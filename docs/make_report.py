"""Takes the README's picture of a report: python docs/make_report.py (needs playwright, Chromium).

Draws eight samples of SmolLM2-135M, or takes what `csd sample --json --drafts` printed into a file.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import csd
from csd.engine.generate import engine_for
from csd.engine.results.result import to_json
from csd.evaluate.report import page
from csd.models.demo import smollm2_path

PROBLEM = (
    "A farmer has 5 hens. Each hen lays 4 eggs. How many eggs are there in total? "
    "Explain it in a few sentences."
)
PICTURE = Path(__file__).parent / "report.png"


def drawn() -> dict:
    model = smollm2_path()
    out = csd.generate(
        model,
        [{"role": "user", "content": PROBLEM}],
        num_samples=8,
        max_new_tokens=200,
        temperature=0.5,
        seed=0,
        drafts=True,
    )
    return to_json(out, engine_for(model).tokenizer, model, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a run's JSON; drawn if left out")
    args = parser.parse_args()
    run = json.loads(args.file.read_text()) if args.file else json.loads(json.dumps(drawn()))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        path = Path(folder) / "report.html"
        path.write_text(page(run), "utf-8")
        browser = p.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        shown = browser.new_page(viewport={"width": 1400, "height": 2040}, device_scale_factor=0.75)
        shown.goto(path.as_uri())
        shown.screenshot(path=PICTURE)
        browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
