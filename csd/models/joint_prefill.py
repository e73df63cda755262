"""Joint prefill of prompts, in which each row has the bits of a prefill of its prompt alone.

A library selects a product's kernel by the number of rows. So an exact product multiplies the rows
of all prompts at once, and any other product one prompt's rows at a time. All other operations of a
layer are per row, and take all rows.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from csd.models.decoder import Decoder
from csd.models.exact import ExactProducts
from csd.models.linear import linear


def reads_together(decoder: Any) -> bool:
    """True if one pass over several prompts gives each the bits of its own pass, and saves time.

    On a CPU the time of a product grows with its rows, so only exact products save time. Experts
    take the rows of all prompts in one product; adapters, and drafters that read a layer's inputs,
    take one prompt at a time.
    """
    if type(decoder) is not Decoder or decoder.adapters is not None or decoder.taps:
        return False
    if not decoder.config.is_plain:
        # attention with windows and caps takes one prompt at a time
        return False
    if isinstance(decoder.linear, ExactProducts):
        return True
    plain = decoder.linear is linear and not decoder.config.experts
    return plain and decoder.embedding.is_cuda


def by_chunks(decoder: Decoder, rows: Sequence[int]) -> Decoder:
    """A copy with products of rows[0] rows, then rows[1], ..; `decoder` itself if exact."""
    if decoder.linear is not linear:
        return decoder

    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out]."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        # written in place, since concatenation would copy all results once more
        for part, target in zip(x.split(rows), out.split(rows), strict=True):
            if bias is None:
                torch.mm(part, weight.T, out=target)
            else:
                torch.addmm(bias, part, weight.T, out=target)
        return out

    made = copy.copy(decoder)
    made.linear = product
    return made
