"""Arguments for a model that a call loads by name."""

from typing import Annotated, TypedDict

import torch

from csd.engine.options.checks import check_device, check_dtype, check_revision
from csd.engine.options.option import Option
from csd.models.load.choose_decoder import check_decoder


class LoadingOptions(TypedDict, total=False):
    """Arguments of `csd.generate` and `csd.stream` for a model that they load."""

    device: Annotated[
        str | torch.device | None,
        Option(
            None,
            "device of a model given by name; by default a GPU if there is one",
            check_device,
            str,
        ),
    ]
    dtype: Annotated[
        str | torch.dtype | None,
        Option(
            None,
            "dtype of a model given by name; by default the checkpoint's on a GPU and on a CPU "
            "that multiplies bfloat16, else float32",
            check_dtype,
            str,
        ),
    ]
    revision: Annotated[
        str | None, Option(None, "branch, tag or commit of a model on the hub", check_revision, str)
    ]
    decoder: Annotated[
        str,
        Option(
            "auto",
            'decoder that runs the model: "fused" is csd\'s own, "module" the model\'s own '
            'module; "auto", the default, takes the fused one if it supports the family and the '
            "module is unmodified",
            check_decoder,
            str,
        ),
    ]
