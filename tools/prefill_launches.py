"""Launches of a prefill on the simulated GPU.

    TRITON_INTERPRET=1 PYTHONPATH=.:tools:tests python tools/prefill_launches.py

The layers are a Llama's of 8B in number and kind, and narrow: launches do not depend on widths.
Products and csd's kernels are counted apart from what is launched around them. Nothing is timed.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import torch
from simulated_gpu import Gpu
from simulated_gpu.tensor import CUDA

import csd
from bench.lib.shapes import SHAPES
from csd.engine.engine import Engine
from csd.models import exact_products
from csd.models.demo import random_decoder
from csd.models.exact_products import ANY_ROWS

LAYERS = SHAPES["llama-3.1-8b"].layers
PRODUCTS = ("mm", "addmm", "row_linear_kernel", "gated_linear_kernel")


def launches(prompts: int, tokens: int, layers: int = LAYERS, exact: bool = False) -> Counter:
    """Launches by name of a call that reads prompts and draws one token of each, without drafts.

    Launches of a call of as many prompts of one token, which read nothing, are subtracted."""
    config = replace(SHAPES["tiny"], family="llama", qk_norm=False, layers=layers)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(config.vocab, (prompts, tokens), generator=generator).tolist()
    # kernels are launched and do nothing, so what they multiply has no bits to compare
    any_rows = mock.patch.object(exact_products, "row_blocks", lambda *_: ANY_ROWS)
    with Gpu(compiled=True, idle=True) as gpu, any_rows:
        decoder = random_decoder(config, CUDA, torch.bfloat16)
        with Engine(decoder, max_slots=prompts, self_check=False, exact=exact) as engine:
            counts = []
            for batch in (texts, texts, [text[:1] for text in texts]):
                before = Counter(gpu.launched)
                # logits of kernels that did nothing are no logits
                csd.generate(
                    engine,
                    batch,
                    num_samples=1,
                    max_new_tokens=1,
                    seed=1,
                    speculate=False,
                    on_error="return",
                )
                counts.append(gpu.launched - before)
    # the first call allocates
    return counts[1] - counts[2]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args(argv)
    by_name = launches(args.prompts, args.tokens, args.layers, args.exact)
    products = sum(by_name[name] for name in PRODUCTS)
    own = (n for name, n in by_name.items() if name.endswith("_kernel") and name not in PRODUCTS)
    kernels = sum(own)
    total = sum(by_name.values())
    for name, count in by_name.most_common():
        print(f"{count:8d} {name}")
    print(
        json.dumps(
            {
                "prompts": args.prompts,
                "tokens": args.tokens,
                "layers": args.layers,
                "exact": args.exact,
                "launches": total,
                "products": products,
                "kernels of csd": kernels,
                "others": total - products - kernels,
                "a prompt": round(total / args.prompts, 1),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
