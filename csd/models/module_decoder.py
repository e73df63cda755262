"""Decoder that runs the user's own module over the pool's rows, with csd's attention.

The rows are one sequence of token ids with explicit positions. There is no cache object, and a mask
of one element, which transformers passes on as it is, stands for all masks. Each attention call
writes its keys and values to the step's scratch, and csd computes its result
(`redirect_attention.py`). All else is the module's: layers, hooks, adapters, quantised products,
caps and multipliers of its head. Nothing of it is copied or rebound, so a training step or another
adapter takes effect in the next pass.
"""

import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from csd.kernels.ops import Ops
from csd.models.adapters import Adapters, base_of
from csd.models.host_reads import captured_experts, host_read_of
from csd.models.module_pass import Pass
from csd.models.module_sizes import NamedSizes, probed_sizes
from csd.models.probe import Call, probe
from csd.models.redirect_attention import Parts, calls_go_to
from csd.models.refuse_patched import hooks_of
from csd.models.refuse_unsupported import refuse_module

# fields with which a config asks for outputs beside the logits
OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")


class ModuleDecoder:
    """Decodes with a transformers model, or a PeftModel around one; holds a weak reference to it.

    why: the property that ruled out the fused decoder, if that was tried.

    Raises ValueError or TypeError naming the property that csd does not run.
    """

    name = "module"

    def __init__(self, model: nn.Module, why: str | None = None):
        refuse_module(model)
        self.why = why
        self._model = weakref.ref(model)
        self._base = weakref.ref(base_of(model))
        self.parts = Parts(base_of(model))
        self.adapters = Adapters(self.parts.modules)
        self._facts = _facts(model)
        taken = inspect.signature(inspect.unwrap(type(self.base).forward)).parameters
        self._keeps_logits = False
        self.captured = False  # whether its steps are, or may be, recorded in graphs
        self._places: list[int] = []  # addresses of its tensors while steps are recorded
        self._mask: torch.Tensor | None = None
        self.admission: Any = None  # the `Admission` that `csd.models.compare_module` measured
        named = NamedSizes.of(self.base)
        found = probe(self.base, self.parts, self.run, tokens=named.vocab, context=named.context)
        self.calls: list[Call] = found.calls
        self.mixers = found.mixers
        # with logits_to_keep, layers that share keys may leave out rows of a prompt too
        shared = any(call.spec.shares is not None for call in self.calls)
        self._keeps_logits = "logits_to_keep" in taken and not shared
        self.device, self.dtype = found.device, found.dtype
        self.config = probed_sizes(named, found)

    def __repr__(self) -> str:
        kinds = list(dict.fromkeys(str(call.spec) for call in self.calls))
        return f"ModuleDecoder({self.config.family}, {len(self.calls)} calls: {'; '.join(kinds)})"

    @property
    def model(self) -> Any:
        return self._there(self._model)

    @property
    def base(self) -> Any:
        """The transformers model; of a PeftModel, the model inside."""
        return self._there(self._base)

    def _there(self, held: weakref.ref) -> Any:
        found = held()
        if found is None:
            raise RuntimeError("the model of this decoder has been deleted: keep a reference to it")
        return found

    @cached_property
    def why_not_static(self) -> str | None:
        """Operation of a pass that reads on the host, which no graph can record; None if none."""
        return host_read_of(self.base, self.parts)

    def capture(self, captured: bool) -> None:
        """Begin or end the recording of steps, which hold addresses of the module's tensors."""
        self.captured, self._places = captured, _places(self.base) if captured else []

    @property
    def graph_key(self) -> tuple:
        """State on which a recorded step depends in addition to its sizes: the active adapters."""
        return self.adapters.state

    def is_current(self) -> bool:
        """True if the module still has the parts, hooks and config that were probed.

        While steps are recorded, it must also have the same tensors.
        """
        moved = self.captured and self._places != _places(self.base)
        return not moved and self._facts == _facts(self.model)

    def begin_call(self) -> None:
        """Called before the first step of a call, which uses the adapters that are active now."""
        self.adapters.begin()

    def follow(self) -> None:
        """Called before a recorded step, in which no pass runs on the host.

        Raises RuntimeError if the call's adapters were merged or removed.
        """
        self.adapters.run(lambda: None)

    @torch.no_grad()
    def forward(
        self,
        token: torch.Tensor,  # [M] int32, -1 in padding
        position: torch.Tensor,  # [M] int32
        attend: Callable,  # from `csd.kernels.attention.layer`
        node_k: torch.Tensor,  # [L, M, K, D], written
        node_v: torch.Tensor,  # [L, M, K, D], written
        ops: Ops | None = None,
    ) -> torch.Tensor:
        """Logits [M, V] of a step; where possible only the last row's, if others are not read."""
        ids = token.clamp(min=0).long()[None]
        only = 1 if getattr(attend, "last", False) else None
        if self._mask is None or self._mask.device != ids.device:
            self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        mask = self._mask

        def once() -> Any:
            answer = Pass(self.calls, self.config.of_calls, attend, node_k, node_v, self.mixers)
            experts = captured_experts(self.parts) if self.captured else nullcontext()
            with calls_go_to(answer, self.parts), experts:
                logits = self.run(ids, position.long()[None], mask, only)
            answer.end()
            return logits[0]

        return self.adapters.run(once)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden`, which are the logits of `forward`: the head is part of the module."""
        return hidden

    def run(
        self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor | None,
        only: int | None = None,
    ) -> Any:  # fmt: skip
        """Logits [1, R, V] of the module; only: number of last rows, if it can leave out others."""
        named: dict[str, Any] = dict(
            input_ids=ids, position_ids=position, attention_mask=mask, use_cache=False
        )
        if only and self._keeps_logits:
            named["logits_to_keep"] = only
        # a loss of routers, or each layer's states, would be computed from the rows of all samples
        text = self.base.config.get_text_config()
        named |= {name: False for name in OUTPUTS if getattr(text, name, None)}
        out = self.base(**named)
        return out[0] if isinstance(out, tuple) else getattr(out, "logits", None)


def _places(base: Any) -> list[int]:
    return [x.data_ptr() for x in (*base.parameters(), *base.buffers())]


def _facts(model: Any) -> tuple:
    """Properties that a probe depends on: parts, hooks, replaced methods, config; not weights."""
    base = base_of(model)
    parts = tuple((id(m), hooks_of(m), "forward" in vars(m)) for m in base.modules())
    weight, config = next(base.parameters()), base.config.to_dict()
    # trainers change these
    for name in ("use_cache", *OUTPUTS):
        config.pop(name, None)
    return parts, weight.device, weight.dtype, repr(config)
