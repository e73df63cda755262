"""Exact decoder: a row's logits have the same bits whatever other rows the step has.

Its products do not depend on the number of rows (`csd/models/exact_products.py`), nor does its
attention on other rows' keys; all other operations of a layer are per row.

Prompts can be read together (`reads_together`), each with the bits of a pass of its own. A library
selects a product's kernel by the number of rows. So an exact product multiplies the rows of all
prompts at once, and any other product one prompt's rows at a time (`by_chunks`); all other
operations take all rows.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from csd.kernels.ops import Ops
from csd.models.exact_products import ExactProducts
from csd.models.fused.decoder import PRODUCTS, Decoder, DecoderLike
from csd.models.fused.linear import in_loops, linear
from csd.models.load import Loaded
from csd.models.portable import first_other

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
# exact products cost no measurable time if rows agree in blocks from two rows to this many
FREE_ROWS = 32
# why an operation is refused
PORTS = "may have other bits on another kind of x86 CPU (docs/portable.md)"


def exact(decoder: Decoder, products: ExactProducts | None = None) -> Decoder:
    """`decoder` over the same weights, with products that do not depend on the number of rows.

    products: those of an earlier call, with the row blocks of its shapes.

    Raises ValueError if no number of rows gives a row the same bits at every index among them.
    """
    made = copy.copy(decoder)
    made.linear = products = products or ExactProducts()
    made.gated, made.parts = products.gated, products.parts
    for weight in _weights(decoder):
        products.learn(weight)
    if products.gated:
        for layer in decoder.layers:
            if layer.gate_up is not None:
                products.gated.learn(layer.gate_up)
    return made


def choose_exact(
    wanted: bool | str | None, loaded: Loaded, ops: Ops, products: ExactProducts
) -> tuple[DecoderLike, bool]:
    """The decoder that an engine runs, and whether it is exact.

    wanted: None takes the exact one if it costs no time. Raises as `exact_decoder` if it is true,
    and with "portable" for an operation whose bits depend on the kind of CPU.
    """
    if wanted == "portable":
        other = first_other(loaded.decoder, loaded.dtype, ops)
        if other is not None:
            raise ValueError(f"exact must be True or False here, got 'portable': {other} {PORTS}")
    if wanted:
        return exact_decoder(loaded, ops, products), True
    # in 16 bits, but not in float32, a library multiplies two rows in the time of one
    free = loaded.dtype in HALVES or any_rows(loaded.decoder)
    if wanted is None and free and ops.exact is None:
        with suppress(ValueError):
            made = exact_decoder(loaded, ops, products)
            if all(b.min_rows <= 2 and b.max_rows >= FREE_ROWS for b in products.blocks.values()):
                return made, True
    return loaded.decoder, False


def exact_decoder(loaded: Loaded, ops: Ops, products: ExactProducts) -> Decoder:
    """`exact` of the loaded decoder; ops: the backend that runs beside its products.

    Raises ValueError if the model or backend cannot be exact, and on a machine where no product is.
    """
    if ops.gathers:
        raise ValueError(
            f"exact must be False with kernels={ops.name!r}, whose attention adds in an order that "
            "depends on the step's rows, got True"
        )
    if loaded.dtype not in DTYPES:
        raise ValueError(f"exact must be False in {loaded.dtype}, got True")
    if not isinstance(loaded.decoder, Decoder):
        made = type(loaded.decoder).__name__
        raise ValueError(f"exact needs csd's fused decoder (a csd Decoder), got a {made}")
    if loaded.decoder.config.experts and loaded.device.type != "cpu":
        raise ValueError("exact must be False for a model of experts on a GPU, got True")
    return exact(loaded.decoder, products)


def _weights(decoder: Decoder) -> list[torch.Tensor]:
    layers = [getattr(x, name) for x in decoder.layers for name in PRODUCTS]
    experts = [x.experts for x in decoder.layers if x.experts is not None]
    # all experts of a layer have the same shapes
    chosen = [w for x in experts for w in (x.router, x.gate_up[0], x.down[0])]
    stacks = [w for x in decoder.layers for own in x.lora.values() for stack in own for w in stack]
    head = [decoder.head, *(w for stack in decoder.head_lora for w in stack)]
    return [w for w in (*layers, *chosen, *stacks, *head) if w is not None]


def any_threads(decoder: DecoderLike, products: ExactProducts, threads: int) -> bool:
    """True if one thread and `threads` give the decoder's products the same bits, by trial."""
    return isinstance(decoder, Decoder) and products.threads_agree(_weights(decoder), threads)


def any_rows(decoder: DecoderLike) -> bool:
    """True if csd's own loops, which compute each row by itself, run all of its products."""
    return isinstance(decoder, Decoder) and all(map(in_loops, _weights(decoder)))


def reads_together(decoder: Any) -> bool:
    """True if one pass over several prompts gives each the bits of its own pass, and saves time.

    On a CPU the time of a product grows with its rows, so only exact products save time. Experts
    take the rows of all prompts in one product; adapters, and drafters that read a layer's inputs,
    take one prompt at a time.
    """
    if type(decoder) is not Decoder or decoder.adapters is not None or decoder.taps:
        return False
    # attention with windows and caps takes one prompt at a time
    if not decoder.config.is_plain:
        return False
    if isinstance(decoder.linear, ExactProducts):
        return True
    return decoder.linear is linear and not decoder.config.experts and decoder.embedding.is_cuda


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
