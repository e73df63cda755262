"""csd serve on a CPU: HTTP compared to `csd.generate`, and n as a group to n separate requests.

    python -m bench serve [MODEL] [--n 8] [--clients 16] [--pairs 9] [--tokens 100]
        [--with KIND PYTHON] [--beside URL NAME] [--json FILE]

SmolLM2-135M-Instruct when no model is given, word problems with the settings of its generation
config (at temperature 0.7 without filters if it sets none). All sides draw the same samples on one
engine, in alternating order:

    one       one request for n choices, through HTTP and with `csd.generate`
    clients   simultaneous clients, each with its own prompt and n choices in one request, and each
              of these choices as a separate request that shares with no other

`--with`, once or more, starts another server of the same model in the environment of a Python: vllm
(`make .venv-vllm/.installed`: .venv-vllm/bin/python), transformers (`pip install
transformers[serving]`) or llama (`pip install 'llama-cpp-python[server]'`). `--beside` names one
that is already running (http://host:port/v1, the model's name there). All of them get the clients'
requests in the same rounds; a server that does not draw n choices gets n requests for one. The
report has tokens per second, medians over the rounds, and the median of the paired ratios with its
bootstrap interval.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import csd
from bench.e2e.cpu import PROBLEMS
from bench.e2e.long.vllm_side import as_folder
from bench.lib.common import bootstrap, finish, table
from bench.lib.llama_cpp import copy_in
from bench.lib.models import HELP, path_of
from bench.lib.servers import NAME, command, fields, free_port, running
from bench.lib.settings import settings_of, words
from csd.serve.http import Server, process

# URL, the model's name there, and the fields of a request with the settings
Place = tuple[str, str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=HELP)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--crowds", type=int, default=3, help="pairs with all clients")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--with", dest="start", nargs=2, action="append", default=[], metavar=("KIND", "PYTHON")
    )
    parser.add_argument("--beside", nargs=2, action="append", default=[], metavar=("URL", "NAME"))
    parser.add_argument("--json")
    args = parser.parse_args()

    model = csd.Engine(path_of(args.model), device="cpu", max_slots=args.slots)
    engine = csd.AsyncEngine(model, max_tokens=2048)
    listening = process(Server(engine, NAME), port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    port = listening.servers[0].sockets[0].getsockname()[1]
    settings = settings_of(model.generation_config)
    own = f"http://127.0.0.1:{port}/v1", NAME, settings
    try:
        with ExitStack() as stack:
            others = {f"{url} {name}": (url, name, settings) for url, name in args.beside}
            others |= started(model, args, stack)
            rows = [one(model, own, args), *crowds(own, others, args)]
    finally:
        listening.should_exit = True
        thread.join()
    print(table(rows))
    print(words(settings))
    head = {"bench": "serve", "settings": settings, "dtype": str(model.dtype)}
    finish(head | {"exact": model.exact, "rows": rows}, args.json)


def started(model: csd.Engine, args: argparse.Namespace, stack: ExitStack) -> dict[str, Place]:
    """Start the servers of `--with`; returns them by kind."""
    if not args.start:
        return {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path, gguf = path_of(args.model), None
    place = as_folder(path, model.dtype, model.tokenizer, folder)
    if any(kind == "llama" for kind, _ in args.start) and path.endswith(".gguf"):
        gguf = str(copy_in(path, model.dtype, folder / "model.gguf"))
    addresses = {}
    for kind, python in args.start:
        port = free_port()
        asked = command(
            kind,
            python,
            place,
            gguf,
            port,
            dtype=str(model.dtype).removeprefix("torch."),
            slots=args.slots,
            tokens=2048,
        )
        name = place if kind == "transformers" else NAME
        log = Path(tempfile.gettempdir()) / f"bench-serve-{kind}.log"
        address = stack.enter_context(running(asked, name, port, log))
        addresses[kind] = *address, fields(kind, settings_of(model.generation_config))
    return addresses


def chat(i: int) -> list[dict]:
    text = PROBLEMS[i % len(PROBLEMS)]
    # each client has its own prompt; problems that repeat get a number
    return [{"role": "user", "content": f"{text} ({i})" if i >= len(PROBLEMS) else text}]


def ask(place: Place, i: int, n: int, tokens: int, **more) -> int:
    """Send a request, wait for its answer, and return its number of new tokens."""
    url, name = urlsplit(place[0]), place[1]
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=3600)
    body = dict(model=name, messages=chat(i), n=n, max_tokens=tokens) | place[2]
    headers = {"Content-Type": "application/json"}
    path = f"{url.path}/chat/completions"
    connection.request("POST", path, json.dumps(body | more), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "usage" not in answer or len(answer["choices"]) != n:
        raise RuntimeError(f"{place[0]} has answered {str(answer)[:1000]}")
    return answer["usage"]["completion_tokens"]


def rate(draw: Callable[[], int]) -> float:
    start = time.perf_counter()
    return draw() / (time.perf_counter() - start)


def one(model: csd.Engine, own: Place, args: argparse.Namespace) -> dict:
    def directly(i: int) -> int:
        out = csd.generate(
            model,
            chat(i),
            num_samples=args.n,
            seed=i,
            max_new_tokens=args.tokens,
            **own[2],
        )
        return out.stats.tokens

    sides = {
        "http": lambda i: ask(own, i, args.n, args.tokens, seed=i),
        "generate": directly,
    }
    return compared("one client", sides, args.pairs, args)[0]


def crowds(own: Place, others: dict[str, Place], args: argparse.Namespace) -> list[dict]:
    def seed(place: Place, i: int) -> dict:
        # vLLM crashes on a CPU if a request with a seed waits for the rest of its prompt
        return {"seed": i} if place == own else {}

    def grouped(place: Place) -> int:
        with ThreadPoolExecutor(args.clients) as pool:
            asked = [
                pool.submit(ask, place, i, args.n, args.tokens, **seed(place, i))
                for i in range(args.clients)
            ]
            return sum(x.result() for x in asked)

    def scattered(place: Place) -> int:
        def more(i: int, j: int) -> dict:
            return seed(place, i) | ({"first_sample": j} if place == own else {})

        with ThreadPoolExecutor(args.clients * args.n) as pool:
            asked = [
                pool.submit(ask, place, i, 1, args.tokens, **more(i, j))
                for i in range(args.clients)
                for j in range(args.n)
            ]
            return sum(x.result() for x in asked)

    def draws_groups(place: Place) -> bool:
        try:
            return ask(place, 0, 2, 2) > 0
        # the server refuses n, or draws one choice nevertheless
        except RuntimeError:
            return False

    name = f"{args.clients} clients"
    sides = {"group": partial(grouped, own), "scattered": partial(scattered, own)}
    for other, place in others.items():
        draw = grouped if draws_groups(place) else scattered
        sides[other if draw is grouped else f"{other}, scattered"] = partial(draw, place)
    return compared(name, {k: lambda _, f=f: f() for k, f in sides.items()}, args.crowds, args)


def compared(
    name: str, sides: dict[str, Callable[[int], int]], pairs: int, args: argparse.Namespace
) -> list[dict]:
    """Rows that compare the first side to each other one; each side runs once as a warm-up."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for draw in sides.values():
        draw(0)
    for i in range(pairs):
        # each side is the first in some rounds
        turn = [*sides][i % len(sides) :] + [*sides][: i % len(sides)]
        for side in turn if i % 2 else turn[::-1]:
            rates[side].append(rate(lambda side=side, i=i: sides[side](i)))
    first, *rest = sides
    return [_row(name, rates, first, second, pairs, args.n) for second in rest]


def _row(
    name: str, rates: dict[str, list[float]], first: str, second: str, pairs: int, n: int
) -> dict:
    over = [a / b for a, b in zip(rates[first], rates[second], strict=True)]
    low, high = bootstrap(over)
    return {
        "case": name,
        "n": n,
        "pairs": pairs,
        "first": first,
        "tok/s": statistics.median(rates[first]),
        "second": second,
        "tok/s there": statistics.median(rates[second]),
        "ratio": statistics.median(over),
        "low": low,
        "high": high,
    }


if __name__ == "__main__":
    main()
