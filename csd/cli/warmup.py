"""`csd warmup`: prepare this machine for the first calls of a model."""

import time
from argparse import Namespace, _SubParsersAction

from csd.cli.common import add_command
from csd.engine.first_call.vocabulary import vocabulary_prior
from csd.engine.generate import engine_for
from csd.engine.options.show import LOADING, add_flags, check_flags, loading

FLAGS = ("num_samples", "max_new_tokens", *LOADING, "decoder")


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "warmup",
        "compile, check and time in advance, so that a model's first calls do not wait",
        [
            "csd warmup MODEL",
            "csd warmup MODEL -n 32 --prompt-tokens 2048",
            "csd warmup MODEL --prior own.csdprior",
        ],
        "gpu.md",
    )
    parser.add_argument("model", help="local folder, hub name or GGUF file")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="number of tokens of the longest prompt"
    )
    parser.add_argument(
        "--prior",
        metavar="FILE",
        help="also write a prior without any text, of the model's likeliest tokens behind each "
        "token of its vocabulary, which takes one pass over it",
    )
    add_flags(parser, FLAGS, num_samples=16)
    parser.set_defaults(run=_warmup)


def _warmup(args: Namespace) -> int:
    """Fill the caches on disk for later processes: kernels or loops, step times, self-check."""
    check_flags(args, FLAGS)
    start = time.perf_counter()
    engine = engine_for(args.model, **loading(args), decoder=args.decoder)
    loaded = time.perf_counter()
    sizes = dict(num_samples=args.num_samples, prompt_tokens=args.prompt_tokens)
    engine.warmup(**sizes, max_new_tokens=args.max_new_tokens or 512)
    done = time.perf_counter()
    print(
        f"loaded and checked in {loaded - start:.1f} s, warmed up in another "
        f"{done - loaded:.1f} s; {len(engine.captured)} graphs captured"
    )
    if args.prior is not None:
        prior = vocabulary_prior(engine)
        prior.save(args.prior)
        print(f"{prior.contexts} contexts in {time.perf_counter() - done:.1f} s, in {args.prior}")
    return 0
