"""csd serve on a CPU: through HTTP against `csd.generate`, and n as a group against n scattered.

    python -m bench serve [MODEL] [--n 8] [--clients 16] [--pairs 9] [--tokens 100]
        [--beside URL NAME] [--json FILE]

SmolLM2-135M-Instruct when no model is given, word problems at temperature 0.7. All sides draw the
same samples on one engine, in alternating order:

    one       one client asks for n, through HTTP and by `csd.generate`
    clients   clients at once, each for n choices of a prompt of its own, and each of these choices
              as a request of its own that shares with no other

`--beside` has another server of the same model (http://host:port/v1, the model's name there), which
gets the clients' requests for n in turn. Reported are tokens a second, medians over the pairs, and
the median of the paired ratios with its bootstrap interval.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import csd
from bench.e2e.cpu import PROBLEMS
from bench.lib.common import bootstrap, finish, table
from csd.integrations.serve import Server, process
from csd.models.demo import smollm2_path

NAME = "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a GGUF file")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--crowds", type=int, default=3, help="pairs with all clients")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--beside", nargs=2, metavar=("URL", "NAME"))
    parser.add_argument("--json")
    args = parser.parse_args()

    model = csd.Engine(args.model or smollm2_path(), device="cpu", max_slots=args.slots)
    engine = csd.AsyncEngine(model, max_tokens=2048)
    listening = process(Server(engine, NAME), port=0)
    thread = threading.Thread(target=listening.run)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    port = listening.servers[0].sockets[0].getsockname()[1]
    own = f"http://127.0.0.1:{port}/v1", NAME
    try:
        rows = [one(model, own, args), *crowds(own, args)]
    finally:
        listening.should_exit = True
        thread.join()
    print(table(rows))
    finish({"bench": "serve", "dtype": str(model.dtype), "exact": model.exact, "rows": rows},
           args.json)  # fmt: skip


def chat(i: int) -> list[dict]:
    text = PROBLEMS[i % len(PROBLEMS)]
    # of as many clients as there are, each has a prompt of its own
    return [{"role": "user", "content": f"{text} ({i})" if i >= len(PROBLEMS) else text}]


def ask(place: tuple[str, str], i: int, n: int, tokens: int, **more) -> int:
    """The new tokens of a request, which it waits for."""
    url, name = urlsplit(place[0]), place[1]
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=3600)
    body = dict(model=name, messages=chat(i), n=n, seed=i, temperature=0.7, max_tokens=tokens)
    headers = {"Content-Type": "application/json"}
    path = f"{url.path}/chat/completions"
    connection.request("POST", path, json.dumps(body | more), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "usage" not in answer:
        raise RuntimeError(f"{place[0]} has answered {answer}")
    return answer["usage"]["completion_tokens"]


def rate(draw: Callable[[], int]) -> float:
    start = time.perf_counter()
    return draw() / (time.perf_counter() - start)


def one(model: csd.Engine, own: tuple[str, str], args: argparse.Namespace) -> dict:
    def directly(i: int) -> int:
        out = csd.generate(
            model, chat(i), num_samples=args.n, seed=i, temperature=0.7,
            max_new_tokens=args.tokens,
        )  # fmt: skip
        return out.stats.tokens

    sides = {
        "http": lambda i: ask(own, i, args.n, args.tokens),
        "generate": directly,
    }
    return compared("one client", sides, args.pairs, args)


def crowds(own: tuple[str, str], args: argparse.Namespace) -> list[dict]:
    def grouped(place: tuple[str, str]) -> int:
        with ThreadPoolExecutor(args.clients) as pool:
            asked = [pool.submit(ask, place, i, args.n, args.tokens) for i in range(args.clients)]
            return sum(x.result() for x in asked)

    def scattered() -> int:
        with ThreadPoolExecutor(args.clients * args.n) as pool:
            asked = [
                pool.submit(ask, own, i, 1, args.tokens, first_sample=j)
                for i in range(args.clients) for j in range(args.n)
            ]  # fmt: skip
            return sum(x.result() for x in asked)

    name = f"{args.clients} clients"
    rows = [
        compared(name, {"group": lambda _: grouped(own), "scattered": lambda _: scattered()},
                 args.crowds, args)
    ]  # fmt: skip
    if args.beside:
        sides = {"group": lambda _: grouped(own), "other": lambda _: grouped(tuple(args.beside))}
        rows.append(compared(f"{name}, beside", sides, args.crowds, args))
    return rows


def compared(
    name: str, sides: dict[str, Callable[[int], int]], pairs: int, args: argparse.Namespace
) -> dict:
    """A row of one side over another; each runs once before it is timed."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for draw in sides.values():
        draw(0)
    for i in range(pairs):
        for side in [*sides] if i % 2 else [*sides][::-1]:
            rates[side].append(rate(lambda side=side, i=i: sides[side](i)))
    first, second = sides
    over = [a / b for a, b in zip(rates[first], rates[second], strict=True)]
    low, high = bootstrap(over)
    return {
        "case": name,
        "n": args.n,
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
