"""`examples/grpo/grpo_history.py` on SmolLM2-135M: tau and seconds of the rollouts by epoch.

    python -m bench grpo_history [--rates 1e-6 1e-5] [--json F] [--plot F.svg]

The example raises an error if completions or losses depend on the history. The rates are an
ordinary learning rate for GRPO and ten times that. An existing result file is completed: rates that
it has are kept.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.lib.common import finish, table
from csd.models.demo import smollm2_path

EXAMPLES = Path(__file__).parents[3] / "examples" / "grpo"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--histories", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion at most")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(EXAMPLES))
    import grpo_history

    rows = []
    if args.json and Path(args.json).exists():
        earlier = json.loads(Path(args.json).read_text())["rows"]
        rows = [r for r in earlier if r["learning_rate"] not in args.rates]
    rows += grpo_history.main(
        epochs=args.epochs,
        tokens=args.tokens,
        rates=args.rates,
        histories=args.histories,
        model=str(smollm2_path()),
        prompts=args.prompts,
    )
    rows.sort(key=lambda r: (r["learning_rate"], r["history"], r["epoch"]))
    print(table(rows))
    if args.plot:
        grpo_history.draw(rows, args.plot)
    options = {name: getattr(args, name) for name in ("epochs", "prompts", "tokens")}
    finish({"bench": "grpo_history", **options, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
