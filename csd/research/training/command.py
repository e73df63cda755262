"""`csd train-head MODEL TRACES -o FOLDER`: train an EAGLE head on a model's own samples."""

import sys
from argparse import Namespace, _SubParsersAction
from typing import get_args, get_type_hints

from csd.cli.common import MODEL, add_command
from csd.research.training.recipe import OWN, Recipe
from csd.research.training.texts import MAX_VOCAB
from csd.research.training.train_head import DTYPES, train_head

# flags of the recipe
FLAGS = {
    "eagle": "kind of head: 2 for EAGLE-2, whose files have EAGLE-1's format, or 3 for EAGLE-3",
    "epochs": "number of passes over the texts",
    "batch": "maximum number of tokens per training step; a longer text is cut",
    "learning_rate": "peak learning rate of AdamW",
    "held_out": "share of the prompts held out from training",
    "every": "number of steps between evaluations on the held-out texts; each also saves the run",
    "seed": "random seed of the weights, the order of the texts and the noise",
    "token_weight": "weight of the cross-entropy, which is added to the loss of the states",
    "noise": "largest uniform noise added to the input states",
    "depth": "number of tokens in the chains drafted during training",
    "decay": "factor of the loss per token of a chain: token j has weight decay^j",
    "draft_vocab": "number of tokens that the head can draft, the most frequent ones in the "
    "samples",
}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "train-head",
        "train an EAGLE head on recorded samples",
        [
            "csd train-head MODEL TRACES.jsonl -o head",
            "csd train-head MODEL TRACES.jsonl -o head --eagle 3",
        ],
        "draft_models.md",
    )
    parser.add_argument("model", help=MODEL)
    parser.add_argument("traces", nargs="+", help="trace files, written by csd record")
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        help=(
            "folder for the head, which must not contain one yet; an interrupted run continues "
            "from it"
        ),
    )
    kinds = get_type_hints(Recipe)
    for name, text in FLAGS.items():
        flag, default = "--" + name.replace("_", "-"), getattr(Recipe, name)
        # an int, a float, or one of them or None
        kind, *_ = get_args(kinds[name]) or (kinds[name],)
        parser.add_argument(flag, type=kind, default=default, help=text + _own(name))
    parser.add_argument("--dtype", choices=NAMES, help="dtype of the head; by default the model's")
    parser.add_argument("--device", help="device to train on; by default a GPU if there is one")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    parser.set_defaults(run=_train)


def _own(name: str) -> str:
    """The kind of head that has a flag of its own, and the flag's default."""
    for eagle, own in OWN.items():
        if name in own:
            default = f"{MAX_VOCAB:,} or all" if own[name] is None else own[name]
            return f"; only with --eagle {eagle}, by default {default}"
    return ""


def _train(args: Namespace) -> int:
    recipe = {name: getattr(args, name) for name in FLAGS}
    try:
        curve = train_head(
            args.model,
            args.traces,
            args.out,
            dtype=NAMES.get(args.dtype),
            device=args.device,
            revision=args.revision,
            progress=not args.quiet,
            **recipe,
        )
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; run the same command again to continue from {args.out}",
            file=sys.stderr,
        )
        return 130
    last = curve[-1]
    text = f"{last['step']} steps, {last['tokens']} tokens, loss {last['loss']:.3f}"
    if last["acceptance"] is not None:
        text += f", held-out acceptance {last['acceptance']:.3f}"
    print(f"{text}, in {args.out}", file=sys.stderr)
    return 0
