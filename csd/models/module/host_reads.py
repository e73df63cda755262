"""Detection of passes that read a tensor's values on the host, which a captured step cannot do.

The pass runs on meta tensors, which have no values: any read raises, wherever it is in the module.
Experts run as they do in a captured step.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from csd.models.redirect import Parts, calls_go_to

ROWS = 5
# implementation of transformers' experts that keeps rows and offsets on the device
EXPERTS = "grouped_mm"


class _Shapes:
    """Attention without values: returns results of the right shape."""

    def mask(self, named: dict[str, Any]) -> None:
        pass

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        named: dict[str, Any],
    ) -> torch.Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def mixer(self, name: str, own: Callable, named: dict[str, Any]) -> Any:
        return own(**named)


@torch.no_grad()
def host_read_of(base: nn.Module, parts: Parts) -> str | None:
    """Description of the operation in a pass that reads values on the host, or None."""
    tensors = [*base.named_parameters(), *base.named_buffers()]
    ids = torch.zeros(1, ROWS, dtype=torch.long, device="meta")
    named = dict(
        input_ids=ids,
        position_ids=ids,
        use_cache=False,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta"),
    )
    try:
        held = {name: x.to("meta") for name, x in tensors}
        with calls_go_to(_Shapes(), parts), captured_experts(parts):
            functional_call(base, held, kwargs=named)
    # a module may raise any exception if a value is missing
    except Exception as error:
        text = re.sub(r"\s+", " ", str(error)).partition(". ")[0][:120]
        return (
            f"{_place(error)} reads a tensor on the host, or does something other than tensor "
            f"operations ({text})"
        )
    return None


@contextmanager
def captured_experts(parts: Parts) -> Iterator[None]:
    """Context in which experts run as grouped products, which read no offsets on the host."""
    with parts.lock:
        configs = [c for c in parts.configs if hasattr(c, "_experts_implementation")]
        before = [c._experts_implementation for c in configs]
        try:
            for config in configs:
                config._experts_implementation = EXPERTS
            yield
        finally:
            for config, name in zip(configs, before, strict=True):
                config._experts_implementation = name


def _place(error: BaseException) -> str:
    """Innermost function of a modeling or integration file in the traceback of an error."""
    module, trace = "its module", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "modeling_" in code.co_filename or "integrations" in code.co_filename:
            module = code.co_qualname
        trace = trace.tb_next
    return module
