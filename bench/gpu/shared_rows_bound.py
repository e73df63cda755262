"""Least time of a GPU's step with a row for each sample, and with a row for each distinct text.

    python -m bench shared_rows_bound [SHAPE ...] [--texts 0.33] [--prompt 300]
        [--bandwidth 3.35e12] [--flops 989e12]

The bound of `bench/gpu/lib/roofline.py` for N samples of one prompt, of which --texts times N have
different texts: a class of equal texts has one row, one draft tree and one read of the tokens drawn
so far. It needs no GPU. The rates are those of an H100 SXM's data sheet, and nothing here is
measured. "drafts" is drafted nodes for each sample, or for each text.
"""

import argparse
from itertools import product
from typing import Any

from bench.gpu.lib.roofline import step_seconds
from bench.gpu.lib.workload import LARGE
from bench.lib.common import table
from bench.lib.shapes import SHAPES

SAMPLES, DRAFTS, CONTEXTS = (16, 64, 256), (0, 4), (150, 1000)


def rows(shape: str, texts: float, **sizes: Any) -> list[dict]:
    """The bounds in milliseconds by number of samples, drafts and tokens drawn so far."""
    out = []
    for samples, drafts, context in product(SAMPLES, DRAFTS, CONTEXTS):
        head = {"shape": shape, "N": samples, "drafts": drafts, "tokens so far": context}
        own, shared = (
            1e3
            * step_seconds(
                SHAPES[shape], rows=(1 + drafts) * live, live=live, context=context, **sizes
            )
            for live in (samples, max(1.0, texts * samples))
        )
        saved = f"{1 - shared / own:.0%}"
        out.append(head | {"own rows ms": own, "shared rows ms": shared, "saved": saved})
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=LARGE[:1], metavar="SHAPE")
    parser.add_argument("--texts", type=float, default=0.33, help="distinct texts per sample")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes per second")
    parser.add_argument("--flops", type=float, default=989e12, help="of 16 bits, per second")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.shapes) - set(SHAPES))
    if unknown:
        parser.error(f"SHAPE must be one of {', '.join(SHAPES)}; got {', '.join(unknown)}")
    for shape in args.shapes:
        rates = {"bandwidth": args.bandwidth, "flops": args.flops}
        print(table(rows(shape, args.texts, prompts=[args.prompt], **rates)))


if __name__ == "__main__":
    main()
