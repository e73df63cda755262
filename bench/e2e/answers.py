"""Eight answers by csd and by other engines: a table and a plot of the documentation.

    python -m bench answers [--model MODEL] [--vllm .venv-vllm/bin/python] [--pairs 7]
        [--without SIDE ...]
    python -m bench answers --plot

Times the first row of `python -m bench.long` anew, with the settings of the model's generation
config, and writes it to bench/results/answers.json, or to answers_MODEL.json for another model than
SmolLM2-135M. The block of docs/experiments/answers.md then has a column for each such file, and
each file its plot. --plot writes these from the files alone. It takes about a quarter of an hour on
2 cores with SmolLM2-135M and some hours with 1.5 billion parameters, and nothing else should run
meanwhile.
"""

import argparse
import json
from pathlib import Path

from bench.e2e.long import picture, tables
from bench.e2e.long.__main__ import run
from bench.e2e.long.plan import PEERS, plan
from bench.lib.models import HELP
from csd.models.demo import DEMO

ROOT = Path(__file__).parents[2]
RESULT = Path("bench/results/answers.json")
PAGE = "docs/experiments/answers.md"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=HELP)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], metavar="SIDE")
    parser.add_argument("--plot", action="store_true", help="write from the files, measure nothing")
    parser.add_argument("--json", type=Path, help="in place of bench/results/answers[_MODEL].json")
    args = parser.parse_args(argv)
    args.json = args.json or ROOT / result_of(args.model)
    if not args.plot:
        # a run continues its file, but the table's figures are of one run
        new = args.json.with_suffix(".new")
        new.unlink(missing_ok=True)
        settings = argparse.Namespace(
            **{**vars(args), "json": new, "minutes": 120, "recorded": None}
        )
        run(settings, plan(full=False, recorded=False)[:1])
        new.replace(args.json)
    update(results(args.json.parent), ROOT / PAGE)


def result_of(model: str | None) -> Path:
    """The file of a model's row."""
    if model in (None, DEMO):
        return RESULT
    return RESULT.with_name(f"answers_{Path(model).name.removesuffix('.gguf')}.json")


def results(folder: Path) -> dict[Path, dict]:
    """Rows by file, SmolLM2-135M's last."""
    files = [*sorted(folder.glob(f"{RESULT.stem}_*.json")), *folder.glob(RESULT.name)]
    return {file: json.loads(file.read_text()) for file in files}


def update(rows: dict[Path, dict], page: Path) -> None:
    """Write the plots, and the page's block between its markers."""
    for file, result in rows.items():
        file.with_suffix(".svg").write_text(picture.svg(result))
    text, begin, end = page.read_text(), tables.BEGIN, tables.END
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{tables.block(*rows.values())}{after}")


if __name__ == "__main__":
    main()
