"""Exact decoder: a row's logits have the same bits whatever other rows the step has.

Its products do not depend on the number of rows (`csd/models/row_blocks.py`), nor does its
attention on other rows' keys; all other operations are per row.
"""

import copy

import torch

from csd.models.decoder import Decoder, DecoderLike
from csd.models.exact_products import ExactProducts
from csd.models.linear import in_loops
from csd.models.load import Loaded

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
# exact products cost no measurable time if rows agree in blocks from two rows to this many
FREE_ROWS = 32


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
    wanted: bool | str | None, loaded: Loaded, kernels: str, products: ExactProducts
) -> tuple[DecoderLike, bool]:
    """The decoder that an engine runs, and whether it is exact.

    wanted: None takes the exact one if it costs no time. Raises as `exact_decoder` if it is true.
    """
    # in 16 bits, but not in float32, a library multiplies two rows in the time of one
    free = loaded.dtype in HALVES or _any_rows(loaded.decoder)
    if wanted is False or (wanted is None and not free):
        return loaded.decoder, False
    if wanted:
        return exact_decoder(loaded, kernels, products), True
    if kernels == "triton":
        return loaded.decoder, False
    try:
        made = exact_decoder(loaded, kernels, products)
    except ValueError:
        return loaded.decoder, False
    free = all(b.least <= 2 and b.most >= FREE_ROWS for b in products.blocks.values())
    return (made, True) if free else (loaded.decoder, False)


def exact_decoder(loaded: Loaded, kernels: str, products: ExactProducts) -> Decoder:
    """`exact` of the loaded decoder; kernels: name of the backend.

    Raises ValueError if the model or backend cannot be exact, and on a machine where no product is.
    """
    if kernels == "reference":
        raise ValueError(
            "exact must be False with kernels='reference', whose attention adds in an order that "
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
    layers = [w for x in decoder.layers for w in (x.qkv, x.out, x.gate_up, x.down)]
    experts = [x.experts for x in decoder.layers if x.experts is not None]
    # all experts of a layer have the same shapes
    chosen = [w for x in experts for w in (x.router, x.gate_up[0], x.down[0])]
    stacks = [w for x in decoder.layers for found in x.lora.values() for s in found for w in s]
    head = [decoder.head, *(w for stack in decoder.head_lora for w in stack)]
    return [w for w in (*layers, *chosen, *stacks, *head) if w is not None]


def _any_rows(decoder: DecoderLike) -> bool:
    return isinstance(decoder, Decoder) and all(map(in_loops, _weights(decoder)))
