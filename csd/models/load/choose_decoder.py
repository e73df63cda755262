"""Choice of the decoder that runs a model: csd's fused one, or the model's own module.

"auto" takes the fused one if csd has the family and the module is plain, else the module, with a
warning that names the reason. The other names force one decoder, and raise the reason for which it
does not run the model.
"""

import contextlib
import sys
import warnings
from pathlib import Path
from typing import Any

from csd.models.fused.decoder import DecoderLike
from csd.models.fused.fusable import checked_config
from csd.models.fused.fuse import fuse
from csd.models.module.admit import admit
from csd.models.module.decoder import ModuleDecoder

DECODERS = ("auto", "fused", "module")


def decoder_of(model: Any, wanted: str) -> DecoderLike:
    """The decoder `wanted` of a model. Raises TypeError or ValueError if it does not run it."""
    why = rules_out_fused(model) if wanted == "auto" else None
    if wanted == "fused" or (wanted == "auto" and why is None):
        return fuse(model)
    try:
        made = module_decoder(model, why)
    except (TypeError, ValueError) as error:
        if why is None or why == str(error):
            raise
        raise type(error)(f"{error}. The fused decoder does not run it either: {why}") from error
    if why is not None:
        warn_caller(
            f"csd runs this {type(model).__name__} by its transformers module: same tokens, slower "
            f"than csd's fused decoder, which does not run it ({why.partition(';')[0]}). See "
            "docs/models.md; decoder='module' asks for it without this notice"
        )
    return made


def module_decoder(model: Any, why: str | None = None) -> ModuleDecoder:
    """Decoder of an admitted module. Raises TypeError or ValueError if the module is refused."""
    made = ModuleDecoder(model, why)
    made.admission = admit(made)
    return made


def rules_out_fused(model: Any) -> str | None:
    """Reason why the fused decoder does not run a model; None if it does."""
    try:
        checked_config(model)
    # a user's own class may have other parts than its family
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return None


# csd's own files, and that of decorators around its functions
INSIDE = (str(Path(__file__).parents[2]), contextlib.__file__)


def warn_caller(text: str) -> None:
    """Issue a UserWarning at the innermost line outside csd, or at csd's outermost line."""
    # level 2 is the caller of this function
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
