"""`csd serve MODEL`: OpenAI's HTTP interface, in which `n` is a group."""

import os
import sys
from argparse import Namespace, _SubParsersAction

import torch

from csd.cli.commands import add_command
from csd.cli.flags import check_counts
from csd.engine.options.flags import add_flags, check_flags
from csd.models.choose_decoder import DECODERS
from csd.schema.arguments import check_number, check_whole
from csd.schema.lazy import check_installed

DTYPES = ("float32", "bfloat16", "float16", "float64")
COUNTS = (
    "max_slots", "max_tokens", "max_queue", "max_n", "max_body", "max_requests", "max_connections",
)  # fmt: skip


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands, "serve", "answer HTTP requests as OpenAI's interface does",
        ["csd serve MODEL --port 8000", "csd serve MODEL --host 0.0.0.0 --api-key SECRET"],
        "serve.md",
    )  # fmt: skip
    parser.add_argument("model", help="a local folder, a hub name or a GGUF file")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for other machines too")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="that clients send; repeatable. By default the words of the "
                        "environment's CSD_API_KEYS; without any, anyone is served")  # fmt: skip
    parser.add_argument("--served-model-name", metavar="NAME",
                        help="by which clients name the model; its own by default")  # fmt: skip
    parser.add_argument("--max-slots", type=int, default=64, help="samples in flight at most")
    parser.add_argument("--max-tokens", type=int,
                        help="of a prompt with a sample's new ones; by default the context, less "
                        "where memory is short")  # fmt: skip
    parser.add_argument("--memory", type=float, default=0.9,
                        help="share of the free memory that caches may take")  # fmt: skip
    parser.add_argument("--max-queue", type=int, default=256, help="requests that wait at most")
    parser.add_argument("--max-n", type=int, default=128, help="choices of a request at most")
    parser.add_argument("--max-body", type=int, default=8 << 20, help="bytes of a request")
    parser.add_argument("--max-requests", type=int, default=512, help="answered at once")
    parser.add_argument("--max-connections", type=int, default=2048, help="open at once")
    parser.add_argument("--share", action="store_true",
                        help="equal prompts of requests without keys are a group too")  # fmt: skip
    parser.add_argument("--weights-folder", metavar="FOLDER",
                        help="whose folders /update_weights takes; off by default")  # fmt: skip
    parser.add_argument("--drain", type=float, default=30.0, metavar="SECONDS",
                        help="that accepted requests have when the server is to end")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="by default what csd.generate takes")
    parser.add_argument("--decoder", choices=DECODERS, default="auto",
                        help="csd's own layers, or the model's own module")  # fmt: skip
    parser.add_argument("--exact", action="store_true",
                        help="the same bits under any load, where that takes time too")  # fmt: skip
    add_flags(parser, ("budget", "speculate", "device", "revision"))
    parser.set_defaults(run=_serve)


def _serve(args: Namespace) -> int:
    check_flags(args, ("budget", "speculate", "device", "revision"))
    check_counts(args, COUNTS)
    check_whole("port", args.port, 0, 65535)
    check_number("drain", args.drain, 0, 86400)
    if args.weights_folder is not None and not os.path.isdir(args.weights_folder):
        raise ValueError(f"weights-folder must be a folder, got {args.weights_folder!r}")
    for package in ("starlette", "uvicorn"):
        check_installed(package, "serve", "csd serve")
    from csd.engine.service import AsyncEngine
    from csd.integrations.serve import Limits, Server, serve

    keys = args.api_key or os.environ.get("CSD_API_KEYS", "").split()
    engine = AsyncEngine(
        args.model, max_slots=args.max_slots, max_tokens=args.max_tokens, memory=args.memory,
        max_queue=args.max_queue, budget=args.budget, speculate=args.speculate,
        device=args.device, revision=args.revision, exact=args.exact or None,
        decoder=args.decoder,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
    )  # fmt: skip
    # the first steps on a machine compile, here before any client waits for them
    few = min(4, engine.longest - 1)
    engine.submit([0], num_samples=2, max_new_tokens=few, ignore_eos=True, seed=0).result()
    name = args.served_model_name or os.path.basename(os.path.normpath(args.model))
    limits = Limits(body=args.max_body, choices=args.max_n, requests=args.max_requests)
    server = Server(
        engine, name, keys=tuple(keys), shares=args.share, weights_folder=args.weights_folder,
        limits=limits,
    )  # fmt: skip

    def begun(port: int) -> None:
        print(
            f"csd: serving {name} at http://{args.host}:{port} ({engine.fingerprint}; "
            f"{args.max_slots} slots, texts of {engine.longest} tokens)", file=sys.stderr,
            flush=True,
        )  # fmt: skip

    serve(
        server, host=args.host, port=args.port, drain=args.drain,
        connections=args.max_connections, begun=begun,
    )  # fmt: skip
    return 0
