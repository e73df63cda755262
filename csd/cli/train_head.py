"""`csd train-head MODEL TRACES -o FOLDER`: train an EAGLE head on a model's own samples."""

import sys
from argparse import Namespace, _SubParsersAction

from csd.cli.commands import add_command
from csd.training.run import Recipe
from csd.training.train_head import DTYPES, train_head

# flags of the recipe, with what they are
FLAGS = {
    "epochs": "how often a text is read",
    "batch": "tokens of a step; a longer text is cut there",
    "learning_rate": "of AdamW, at its highest",
    "token_weight": "of the cross-entropy beside the states' loss",
    "noise": "uniform noise on the states that are read, at most",
    "held_out": "share of the prompts that are not learnt",
    "every": "steps between two measures of the held-out texts, which also save the run",
    "seed": "of the weights, the order of the texts and the noise",
}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands, "train-head", "train an EAGLE head on recorded samples",
        ["csd train-head MODEL TRACES.jsonl -o head"], "draft_models.md",
    )  # fmt: skip
    parser.add_argument("model", help="a local folder, a hub name or a GGUF file")
    parser.add_argument("traces", nargs="+", help="as csd record writes them")
    parser.add_argument("-o", "--out", required=True, help="folder without a head; a run that was "
                        "interrupted goes on")  # fmt: skip
    for name, text in FLAGS.items():
        default = getattr(Recipe, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=text)
    parser.add_argument("--dtype", choices=NAMES, help="of the head; by default the model's")
    parser.add_argument("--device", help="by default a GPU if there is one")
    parser.add_argument("--revision", help="of a hub name")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_train)


def _train(args: Namespace) -> int:
    recipe = {name: getattr(args, name) for name in FLAGS}
    try:
        curve = train_head(
            args.model, args.traces, args.out, dtype=NAMES.get(args.dtype), device=args.device,
            revision=args.revision, progress=not args.quiet, **recipe,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    last = curve[-1]
    text = f"{last['step']} steps over {last['tokens']} tokens, loss {last['loss']:.3f}"
    if last["acceptance"] is not None:
        text += f", held-out acceptance {last['acceptance']:.3f}"
    print(f"{text}, in {args.out}", file=sys.stderr)
    return 0
