"""`csd serve MODEL`: OpenAI's HTTP interface, in which `n` is a group."""

import logging
import os
import sys
from argparse import Namespace, _SubParsersAction
from importlib.util import find_spec
from typing import Any

from csd.cli.common import MODEL, add_command, add_plain_flags
from csd.engine.options.engine_arguments import ServerOptions, ServiceOptions
from csd.engine.options.show import LOADING, add_flags, check_flags
from csd.utils.arguments import options_of
from csd.utils.lazy import check_installed
from csd.utils.phases import phase, showing

ENGINE_FLAGS = (
    *("max_slots", "max_tokens", "memory", "max_queue", "budget", "speculate", "prior"),
    *("exact", "prefix_cache", "share_rows", *LOADING, "decoder"),
)
SERVER_FLAGS = tuple(options_of(ServerOptions))
# flags that may be repeated: the name of a value, and the help
REPEATED = (
    (
        "--api-key",
        "KEY",
        "API key that clients must send; repeatable. By default the words of the environment "
        "variable CSD_API_KEYS; without any key, all requests are accepted",
    ),
    (
        "--allowed-host",
        "NAME",
        "name under which clients reach a server without keys, beside loopback and its own "
        "address; repeatable",
    ),
    (
        "--allow-origin",
        "ORIGIN",
        "origin of web pages that may use the server, such as https://example.com; repeatable",
    ),
    (
        "--learn-prior",
        "KEY",
        "API key whose requests draft from a prior of its own, which begins as --prior and "
        "learns from this key's answers alone; repeatable",
    ),
)


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands,
        "serve",
        "serve the model over HTTP with OpenAI's API",
        ["csd serve MODEL --port 8000", "csd serve MODEL --host 0.0.0.0 --api-key SECRET"],
        "serve.md",
    )
    parser.add_argument("model", help=MODEL)
    for flag, metavar, text in REPEATED:
        parser.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests; by default the model's own",
    )
    parser.add_argument(
        "--weights-folder",
        metavar="FOLDER",
        help="folder from whose subfolders /update_weights may load weights; by default "
        "/update_weights is off",
    )
    add_plain_flags(
        parser,
        access_log="write a line per request to standard error: address, method, path, status, "
        "seconds, id",
        share="also group equal prompts of different requests that have no key",
        enable_auto_tool_choice="accepted for commands of vLLM; it is always on",
    )
    add_flags(parser, ENGINE_FLAGS, ServiceOptions)
    add_flags(parser, SERVER_FLAGS, ServerOptions)
    parser.set_defaults(run=_serve)


def _prepare(engine: Any) -> None:
    """Run the first steps, which compile on a new machine, before any client waits for them.

    Answers in JSON run further loops, so one is drawn too.
    """
    few = min(4, engine.longest - 1)
    engine.submit([0], num_samples=2, max_new_tokens=few, ignore_eos=True, seed=0).result()
    if find_spec("llguidance") is not None and engine.engine.tokenizer is not None:
        schema = {"type": "boolean"}
        engine.submit([0], num_samples=2, max_new_tokens=few, json_schema=schema, seed=1).result()


def _serve(args: Namespace) -> int:
    check_flags(args, ENGINE_FLAGS, ServiceOptions)
    check_flags(args, SERVER_FLAGS, ServerOptions)
    if args.weights_folder is not None and not os.path.isdir(args.weights_folder):
        raise ValueError(f"weights-folder must be an existing folder, got {args.weights_folder!r}")
    for package in ("starlette", "uvicorn"):
        check_installed(package, "serve", "csd serve")
    from csd.serve import AsyncEngine
    from csd.serve.http import Limits, Server, serve
    from csd.serve.http.api.calls.forms import check_parser
    from csd.serve.http.app import check_host, check_origin
    from csd.serve.http.clients import check_keys, owner_of
    from csd.serve.http.run import bound

    check_parser("--tool-call-parser", args.tool_call_parser)
    keys = args.api_key
    check_keys("--api-key", keys)
    if not keys and "CSD_API_KEYS" in os.environ:
        keys = os.environ["CSD_API_KEYS"].split()
        # an unset secret of a deployment must not open the server
        check_keys("CSD_API_KEYS", keys or [""])
    for key in args.learn_prior:
        if key not in keys:
            raise ValueError("--learn-prior must be one of the API keys, got another one")
    hosts = [check_host("--allowed-host", name) for name in args.allowed_host]
    origins = [check_origin("--allow-origin", origin) for origin in args.allow_origin]
    given: dict[str, Any] = {name: getattr(args, name) for name in ENGINE_FLAGS}
    # before the model, which takes minutes
    sockets = bound(args.host, args.port)
    # in a log too: a machine's first start takes a minute
    with showing(True):
        owners = [owner_of(key.encode()) for key in args.learn_prior]
        engine = AsyncEngine(args.model, **given, learn_from=owners)
        with phase("drawing a text and a JSON value, which compile what is left", None):
            _prepare(engine)
    name = args.served_model_name or os.path.basename(os.path.normpath(args.model))
    server = Server(
        engine,
        name,
        keys=tuple(keys),
        shares=args.share,
        group_window=args.group_window,
        weights_folder=args.weights_folder,
        hosts=tuple(hosts),
        origins=tuple(origins),
        limits=Limits(body=args.max_body, choices=args.max_n, requests=args.max_requests),
        tool_call_parser=args.tool_call_parser,
    )

    if args.access_log:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("csd.access").addHandler(lines)
        logging.getLogger("csd.access").setLevel(logging.INFO)

    def begun(port: int) -> None:
        about = f"{args.max_slots} slots, up to {engine.longest} tokens per prompt and sample"
        print(
            f"csd: serving {name} at http://{args.host}:{port} ({engine.fingerprint}; {about})",
            file=sys.stderr,
            flush=True,
        )

    serve(
        server,
        host=args.host,
        port=args.port,
        drain=args.drain,
        connections=args.max_connections,
        sockets=sockets,
        begun=begun,
    )
    return 0
