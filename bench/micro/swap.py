"""Training and decoding of a stock transformers model, with `csd.apply_kernels` and without.

    python -m bench swap [--tokens N] [--rounds N] [--dtype float32] [--device cpu] [--json F]

Qwen2.5-0.5B's shape with random weights: a training step (forward and backward over `--tokens`
tokens) and a decoding step (one token after them), each in eager mode and with torch.compile
(`--eager` leaves that out). A figure is the median over alternated rounds, a ratio the median of
the rounds' ratios. On a CPU csd's kernels are the reference implementations, so no gain is
possible there.
"""

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
import transformers

import csd
from bench.lib.common import finish, table
from bench.lib.step_pass import DTYPES, SHAPE, alternated


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    config = transformers.Qwen2Config(**SHAPE | {"num_hidden_layers": args.layers})
    stock = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype])
    stock = stock.to(args.device)
    swapped = copy.deepcopy(stock)
    csd.apply_kernels(swapped)
    models = {"stock": stock, "csd": swapped}
    ids = torch.randint(config.vocab_size, (1, args.tokens), device=args.device)
    rows = []
    for code in ("eager", "compiled")[: 1 if args.eager else 2]:
        made = {k: m if code == "eager" else torch.compile(m) for k, m in models.items()}
        for job, work in (("training", training), ("decoding", decoding)):
            sides = {name: work(model, ids) for name, model in made.items()}
            for run in sides.values():
                # the first call compiles
                run()
            seconds = alternated(sides, args.rounds)
            pairs = zip(seconds["stock"], seconds["csd"], strict=True)
            rows.append(
                {
                    "job": job,
                    "code": code,
                    **{f"{k}, ms": 1e3 * statistics.median(s) for k, s in seconds.items()},
                    "stock / csd": statistics.median(a / b for a, b in pairs),
                }
            )
    print(table(rows))
    finish(
        {
            "bench": "swap",
            "dtype": args.dtype,
            "device": args.device,
            "tokens": args.tokens,
            "layers": args.layers,
            "rows": rows,
        },
        args.json,
    )


def training(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Returns a call of a forward and a backward pass."""

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        wait(ids)

    return run


def decoding(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """Returns a call that decodes one token after a cached text, then crops the cache to it."""
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values

    @torch.no_grad()
    def run() -> None:
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        wait(ids)

    return run


def wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
