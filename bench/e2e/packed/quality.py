"""KL divergence of each way to run a GGUF file from the float32 forward pass of its numbers."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.e2e.packed.texts import texts
from csd.gradient.fused import FusedPass
from csd.gradient.policy import policy_of
from csd.gradient.rows import Rows
from csd.models.load import gguf, tokenizer_of

# by name: dtype in which the file is unpacked, or None
WAYS = {"float32": torch.float32, "packed": None, "bfloat16": torch.bfloat16}
LLAMA_CPP = "llama.cpp"
# the part of a divergence whose first positions are left out
LATER = "without position 0"

Forward = Callable[[list[int]], torch.Tensor]


def measure(path: str, tokens: int, ways: list[str]) -> list[dict]:
    """A row for each way and kind of text; the reference's log-probabilities lie on the disk."""
    given = list(texts(tokenizer_of(path), tokens))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        reference = None
        for way in ("float32", *ways):
            kls: list[torch.Tensor] = []
            hits: list[torch.Tensor] = []
            with forward_of(path, way, tokens) as forward:
                for i, (_, ids) in enumerate(given):
                    z = torch.log_softmax(forward(ids).double(), -1)
                    if reference is None or len(reference) <= i:
                        reference = (reference or []) + [Path(folder) / f"{i}.npy"]
                        np.save(reference[i], z.float().numpy())
                        continue
                    want = torch.from_numpy(np.load(reference[i])).double()
                    want = want.log_softmax(-1)
                    kls.append((want.exp() * (want - z)).sum(-1))
                    hits.append(want.argmax(-1) == z.argmax(-1))
            if kls:
                rows += list(_rows(way, [kind for kind, _ in given], kls, hits))
                print(*rows[-5:], sep="\n", flush=True)
    return rows


def _rows(way: str, kinds: list[str], kls: list, hits: list) -> Iterator[dict]:
    for name in ("all", LATER, *dict.fromkeys(kinds)):
        first = 1 if name == LATER else 0
        chosen = [i for i, kind in enumerate(kinds) if name in ("all", LATER, kind)]
        kl, hit = (torch.cat([x[i][first:] for i in chosen]) for x in (kls, hits))
        yield {
            "way": way,
            "texts": name,
            "tokens": len(kl),
            "KL mean": kl.mean().item(),
            "median": kl.median().item(),
            "p90": kl.quantile(0.9).item(),
            "largest": kl.max().item(),
            "top-1": hit.double().mean().item(),
        }


def forward_of(path: str, way: str, tokens: int) -> Any:
    """Context of a function from token ids to logits [len, V]."""
    if way == LLAMA_CPP:
        from bench.lib.llama_cpp import LlamaCpp

        side = LlamaCpp(path, 1, cells=max(tokens, 512))
        return nullcontext(side.logits)
    with gguf.read_once():
        module = gguf.read(path, WAYS[way])
    return nullcontext(_of_csd(module))


def _of_csd(module: Any) -> Forward:
    """csd's exact forward pass, whose bits are those of its samples."""

    @torch.no_grad()
    def forward(ids: list[int]) -> torch.Tensor:
        source = policy_of(module)
        policy = source.policy
        # the row of a completion's last token is not computed
        rows = Rows.of([ids], [[[0]]], "cpu")
        run = FusedPass(module, policy.decoder, policy.ops, source.chunk)
        return policy.decoder.logits(run.hidden(rows, recompute=False))

    return forward
