"""Seconds of the fused decoder's pass over a step's rows with a LoRA, and without one.

    python -m bench lora_step [--rows N ..] [--rank R] [--rounds N] [--dtype float32] [--json F]

Qwen2.5-0.5B's shape with random weights, 8 samples in flight after a prompt of 128 tokens, and a
LoRA of all its projections in float32, as peft makes it. "module" is the pass of the module
decoder, adapter included. A figure is the median over alternated rounds; a ratio is the median of
the rounds' ratios.
"""

import argparse
import copy
import statistics
import warnings
from dataclasses import replace

import peft
import transformers

import csd
from bench.lib.common import finish, table
from bench.lib.step_pass import DTYPES, SHAPE, alternated, filled, passes
from csd.models.fused.decoder import Decoder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    config = transformers.Qwen2Config(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype]).eval()
    made = peft.LoraConfig(r=args.rank, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, made)
    step = filled(csd.Engine(model, decoder="fused"))
    other = filled(csd.Engine(model, decoder="module"))
    assert isinstance(step.decoder, Decoder)
    alone = replace(step, decoder=without_adapters(step.decoder))
    rows = []
    for count in args.rows:
        sides = {"lora": step, "none": alone, "module": other}
        seconds = alternated({k: passes(s, count) for k, s in sides.items()}, args.rounds)
        rows.append(
            {"rows": count, **{f"{k}, ms": 1e3 * statistics.median(s) for k, s in seconds.items()}}
        )
        for name in ("lora", "module"):
            ratios = [a / b for a, b in zip(seconds[name], seconds["none"], strict=True)]
            rows[-1][f"{name} / none"] = statistics.median(ratios)
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    finish({"bench": "lora_step", "dtype": args.dtype, "rank": args.rank, "rows": rows}, args.json)


def without_adapters(decoder: Decoder) -> Decoder:
    """Returns a decoder with the same weights, without the LoRA."""
    made = copy.copy(decoder)
    made.layers = [replace(layer, lora={}) for layer in decoder.layers]
    made.adapters, made.head_lora = None, []
    return made


if __name__ == "__main__":
    main()
