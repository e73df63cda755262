"""Launches and passes over the vocabulary of a step's verification, counted as compiled for sm_90.

python -m bench vocabulary_reads [--vocab 20000] [--before F] [--json F]

A pass loads each of a row's logits once. The compiled code runs instruction by instruction
(`tools/ptx`), or Triton interprets the kernels (TRITON_INTERPRET=1). A row's head fits its list
("narrow"), or only the tokens that a filter keeps do ("broad"), or neither ("flat"); all tokens of
the last row are equal. Counts, not times.
"""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from bench.gpu.lib.reads import Reads, counted
from bench.lib.common import finish, table, write
from csd.kernels.verify.triton.launch import decide_triton
from csd.state.pool import Pool
from csd.state.pool_builder import roots
from csd.state.slots import Slots

TEMPERATURE = 0.7
QWEN = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
SETTINGS = {
    "plain": {},
    "top-k 20": {"top_k": 20},
    "top-p 0.8": {"top_p": 0.8},
    "penalty 1.05": {"repetition_penalty": 1.05},
    "Qwen's three": QWEN,
}
# standard deviation of the logits, and by how much the likeliest 30 tokens are above the others
ROWS = {"narrow": (1.0, 12.0), "broad": (2.0, 0.0), "flat": (0.5, 0.0)}
EQUAL = {"equal": (0.0, 0.0)}


def case(kind: str, vocab: int, options: dict) -> tuple[torch.Tensor, Pool, Slots]:
    """Logits of one row of a kind, its pool and its slot with `options`."""
    g = torch.Generator().manual_seed(0)
    spread, above = (ROWS | EQUAL)[kind]
    logits = torch.randn(1, vocab, generator=g) * spread
    logits[0, torch.randperm(vocab, generator=g)[:30]] += above
    slots = Slots.empty(1, vocab, 30, 4)
    slots.live[:], slots.group[:], slots.max_new[:] = True, 0, 30
    slots.key[:], slots.context[:], slots.prompt_len[0] = 0x1234567_89ABCDEF, 3, 5
    slots.temperature[:] = TEMPERATURE
    # a prompt of some of the tokens
    slots.seen[:, ::7] = 0x01010101
    for name, value in options.items():
        getattr(slots, name)[:] = value
    return logits.bfloat16(), roots(slots, 1), slots


def reads_of(kind: str, vocab: int, options: dict, compiled: bool) -> Reads:
    """Launches and loads of the logits of one row."""
    logits, pool, slots = case(kind, vocab, options)
    with counted(logits, compiled) as reads:
        decide_triton(logits, pool, slots, False, False)
    return reads


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=20000)
    parser.add_argument("--before", help="result of another commit to keep beside this one's")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows, compiled = [], os.environ.get("TRITON_INTERPRET") != "1"
    context = nullcontext()
    if compiled:
        sys.path.append(str(Path(__file__).parents[3] / "tools"))
        from ptx.launch import emulated

        context = emulated("sm_90")
    with context:
        for kind in ROWS | EQUAL:
            for name, options in SETTINGS.items():
                reads = reads_of(kind, args.vocab, options, compiled)
                passes = {k: n / (2 * args.vocab) for k, n in reads.loaded.items()}
                counts = passes | {"passes": sum(passes.values())}
                row = {"row": kind, "settings": name, "launches": len(reads.launches)}
                rows.append(row | {k: round(n, 2) for k, n in counts.items()})
                print(rows[-1], flush=True)
    print(table(rows))
    result = {"vocab": args.vocab, "compiled": compiled, "rows": rows}
    if args.before:
        earlier = json.loads(Path(args.before).read_text())
        result["before"] = {"commit": earlier["machine"]["commit"], "rows": earlier["rows"]}
    write(result, args.json, indent=1)
    finish(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
