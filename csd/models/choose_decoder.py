"""The decoder that runs a model: csd's fused one, or the model's own module.

"auto" takes the fused one where csd has the family and the module is plain, else the module, with a
warning that names what ruled out the fused one. The other names force one, and raise its reason.
"""

import warnings
from typing import Any

from csd.models.admit import admit
from csd.models.checked import checked_config
from csd.models.decoder import DecoderLike
from csd.models.fuse import fuse
from csd.models.module_decoder import ModuleDecoder
from csd.schema.arguments import check_one_of

DECODERS = ("auto", "fused", "module")


def check_decoder(value: Any) -> None:
    """Raises TypeError or ValueError, naming `decoder`."""
    check_one_of("decoder", value, names=DECODERS)


def decoder_of(model: Any, wanted: str) -> DecoderLike:
    """Raises TypeError or ValueError for a model that none of the wanted decoders runs."""
    why = None if wanted == "module" else rules_out_fused(model)
    if wanted == "fused" or (wanted == "auto" and why is None):
        return fuse(model)
    try:
        made = module_decoder(model, why)
    except (TypeError, ValueError) as error:
        if why is None or why == str(error):
            raise
        raise type(error)(f"{error}. The fused decoder does not run it either: {why}") from error
    if why is not None:
        warnings.warn(
            f"csd draws with the module of this {type(model).__name__} itself (decoder='module'), "
            f"since its fused decoder does not run it: {why}",
            stacklevel=2,
        )
    return made


def module_decoder(model: Any, why: str | None = None) -> ModuleDecoder:
    """The admitted decoder of a module. Raises TypeError or ValueError where it is refused."""
    made = ModuleDecoder(model, why)
    made.admission = admit(made)
    return made


def rules_out_fused(model: Any) -> str | None:
    """The property of a model that the fused decoder does not run, None where it runs the model."""
    try:
        checked_config(model)
    # a class of the user's own may have other parts than its family
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None
