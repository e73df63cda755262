"""README's example: its code is run, and what it prints is written below it, with its picture.

    python -m bench readme_example [--plot]

Runs the code twice, each time in a process of its own, since the first one compiles loops and times
steps, and writes what the second one prints to bench/results/example.json and to README.
--plot writes README and the picture from the file alone.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from bench.e2e import run_picture
from bench.lib.common import finish

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench/results/example.json"
# the code, and the text below it
BLOCKS = re.compile(r"(```python\n(import csd\n.*?)```\n\n```text\n).*?(?=```)", re.DOTALL)
# after the code: the answers, for the picture
SAVED = """
import json, sys
labels = [answer or "no answer" for answer in csd.vote(out).answers]
run = {"tokens": out.tokens, "sources": [list(s.sources) for s in out], "labels": labels}
with open(sys.argv[1], "w") as file:
    json.dump(run, file)
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", action="store_true", help="write README from the file")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    if not args.plot:
        found = BLOCKS.search(readme.read_text())
        assert found is not None, "README has no block of code with a text below it"
        code = found[2]
        with tempfile.NamedTemporaryFile() as saved:
            for _ in range(2):
                done = subprocess.run(
                    [sys.executable, "-c", code + SAVED, saved.name],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    cwd=ROOT,
                )
            run = json.loads(saved.read())
        printed = done.stdout.splitlines()
        finish({"bench": "readme_example", "printed": printed, "run": run}, RESULT)
    update(json.loads(RESULT.read_text()), readme)


def update(result: dict, readme: Path) -> None:
    """Write the text below README's code, and the picture."""
    run = result["run"]
    count = sum(map(len, run["tokens"]))
    title = f"{len(run['tokens'])} answers to one question: {count:,} tokens"
    RESULT.with_suffix(".svg").write_text(run_picture.svg(title, run))
    text = readme.read_text()
    readme.write_text(BLOCKS.sub(lambda m: m[1] + shown(result), text, count=1))


def shown(result: dict) -> str:
    """Printed lines, folded, and the machine."""
    here = result["machine"]
    lines = [*result["printed"], f"# on {here['cores']} cores of {here['cpu']}"]
    folded = (textwrap.wrap(x, 120, break_long_words=False, break_on_hyphens=False) for x in lines)
    return "".join(f"{line}\n" for part in folded for line in part)


if __name__ == "__main__":
    main()
