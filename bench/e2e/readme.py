"""README's table and plot: eight answers by csd and by other engines, measured and written.

    python -m bench readme [--vllm .venv-vllm/bin/python] [--model PATH] [--pairs 7]
    python -m bench readme --plot

Times the first row of `python -m bench.long` anew, writes bench/results/readme.json, and from it
README's block and bench/results/readme.svg. --plot writes these two from the file alone. It takes
about a quarter of an hour on 2 cores, and nothing else should run meanwhile.
"""

import argparse
import json
from pathlib import Path

from bench.e2e.long import picture, readme_table
from bench.e2e.long.__main__ import run
from bench.e2e.long.plan import plan

ROOT = Path(__file__).parents[2]
RESULT = Path("bench/results/readme.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a GGUF file; SmolLM2-135M when not given")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--plot", action="store_true", help="write from the file, measure nothing")
    parser.add_argument("--json", type=Path, default=ROOT / RESULT)
    args = parser.parse_args(argv)
    if not args.plot:
        # a run continues its file, but README's figures are of one run
        new = args.json.with_suffix(".new.json")
        new.unlink(missing_ok=True)
        settings = argparse.Namespace(
            **{**vars(args), "json": new, "minutes": 120, "recorded": None}
        )
        run(settings, plan(full=False, recorded=False)[:1])
        new.replace(args.json)
    update(json.loads(args.json.read_text()), ROOT / "README.md", args.json.with_suffix(".svg"))


def update(result: dict, readme: Path, plot: Path) -> None:
    """Write the plot, and README's block between its markers."""
    plot.write_text(picture.svg(result))
    text, begin, end = readme.read_text(), readme_table.BEGIN, readme_table.END
    before, after = text.split(begin)[0], text.split(end)[1]
    readme.write_text(f"{before}{readme_table.block(result)}{after}")


if __name__ == "__main__":
    main()
