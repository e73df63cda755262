"""Packing of a decoder's weights into the layout that the CPU's library multiplies.

Otherwise the library would convert a matrix to that layout in every product. A packed matrix
replaces the plain one, so only a decoder that does not share its weights is packed.
"""

import torch

from csd.models.decoder import Decoder
from csd.models.linear import packed
from csd.state.device import free_bytes

# a tied head is packed in addition to the embedding if free memory is this many times its size
SPARE = 16


def pack(decoder: Decoder) -> None:
    """Pack the decoder's matrices in place, one at a time.

    The embedding is read by rows and stays plain. Does nothing on a GPU and for dtypes that oneDNN
    does not multiply here.
    """
    if decoder.embedding.device.type != "cpu":
        return
    for layer in decoder.layers:
        for name in ("qkv", "out", "gate_up", "down"):
            if getattr(layer, name) is not None:
                setattr(layer, name, packed(getattr(layer, name)))
    if _tied(decoder) and not _fits(decoder.head):
        return
    decoder.head = packed(decoder.head)


def _tied(decoder: Decoder) -> bool:
    return decoder.head.data_ptr() == decoder.embedding.data_ptr()


def _fits(weight: torch.Tensor) -> bool:
    return free_bytes(weight.device) >= SPARE * weight.numel() * weight.element_size()
