"""`csd prior FILES -o FILE`: a prior from recorded answers."""

import sys
from argparse import Namespace, _SubParsersAction

from csd.cli.common import add_command
from csd.engine.options.show import add_flags, check_flags
from csd.graph.prior import DEFAULT_CONTEXTS, MAX_CONTEXTS, MIN_CONTEXTS, Prior, is_prior
from csd.models.load import tokenizer_of
from csd.models.load.checkpoint import quiet_libraries
from csd.traces.traces import read_traces


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "prior",
        "learn n-grams of recorded answers, which draft for other prompts",
        ["csd prior traces.jsonl -o math.csdprior", "csd prior *.csdprior -o all.csdprior"],
        "history.md",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="trace file of csd record, or a prior to merge"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--contexts",
        type=int,
        default=DEFAULT_CONTEXTS,
        help=f"capacity of the table, a power of two from {MIN_CONTEXTS} to {MAX_CONTEXTS}",
    )
    parser.add_argument(
        "--model",
        help="model whose tokenizer the token ids are of; its weights are not loaded. The prior is "
        "then refused for models with another tokenizer",
    )
    add_flags(parser, ("revision",))
    parser.set_defaults(run=_prior)


def _prior(args: Namespace) -> int:
    check_flags(args, ("revision",))
    if args.revision is not None and args.model is None:
        raise ValueError(f"revision needs --model, whose tokenizer it is of, got {args.revision!r}")
    tokenizer = None
    if args.model is not None:
        with quiet_libraries():
            tokenizer = tokenizer_of(args.model, args.revision)
        if tokenizer is None:
            raise ValueError(f"model must have a tokenizer, got {args.model!r}")
    prior = Prior(contexts=args.contexts, tokenizer=tokenizer)
    for path in args.files:
        if is_prior(path):
            prior.merge(Prior.load(path))
            continue
        for trace in read_traces(path):
            prior.add(trace.prompt, trace.samples, trace.top)
    prior.save(args.out)
    print(
        f"{prior.contexts} contexts of {prior.tokens} tokens ({prior.nbytes / 1e6:.1f} MB in "
        f"memory), in {args.out}",
        file=sys.stderr,
    )
    return 0
