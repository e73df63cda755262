"""Prompts that are read together: each row keeps the bits that it has where its prompt is alone.

A library picks a product's kernel by its number of rows. So a product is either exact, and takes
the rows of all prompts at once, or is taken of one prompt's rows at a time. Everything else of a
layer is per row, and takes all rows.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from csd.models.decoder import Decoder
from csd.models.exact import ExactProducts
from csd.models.linear import linear


def reads_together(decoder: Any) -> bool:
    """True if prompts of one pass have the bits of a pass of their own, and gain by it.

    On a CPU a product takes the time that its rows take, so only exact ones gain. Experts choose
    rows of all prompts for a product; adapters, and drafters that read a layer's inputs, take one
    prompt at a time.
    """
    if type(decoder) is not Decoder or decoder.adapters is not None or decoder.taps:
        return False
    if not decoder.config.is_plain:
        # attention with windows and caps reads one prompt
        return False
    if isinstance(decoder.linear, ExactProducts):
        return True
    plain = decoder.linear is linear and not decoder.config.experts
    return plain and decoder.embedding.is_cuda


def by_chunks(decoder: Decoder, rows: Sequence[int]) -> Decoder:
    """`decoder` with products of rows[0] rows, then rows[1], ..; as it is where these are exact."""
    if decoder.linear is not linear:
        return decoder

    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [M, in], weight: [out, in], bias: [out]. Returns [M, out]."""
        out = x.new_empty(x.shape[0], weight.shape[0])
        # in place: to put results together would move all of them once more
        for part, target in zip(x.split(rows), out.split(rows), strict=True):
            if bias is None:
                torch.mm(part, weight.T, out=target)
            else:
                torch.addmm(bias, part, weight.T, out=target)
        return out

    made = copy.copy(decoder)
    made.linear = product
    return made
