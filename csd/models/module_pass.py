"""Calls of one pass of a module over the pool's rows, computed by csd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from csd.models.mixer_calls import MixerCall, answer, size_of
from csd.models.probe import Call
from csd.models.redirect_mixers import CONVOLUTION


class Pass:
    """Computes the calls of one pass, which must come in the probed order."""

    __slots__ = (
        "at", "attend", "calls", "convs", "mixer_at", "mixers", "node_k", "node_v", "plain",
    )  # fmt: skip

    def __init__(
        self, calls: list[Call], plain: tuple[int, int, int] | None, attend: Any,
        node_k: Any, node_v: Any, mixers: Sequence[MixerCall] = (),
    ):  # fmt: skip
        self.calls, self.plain, self.attend = calls, plain, attend
        # number of mixer calls so far, and of the convolutions among them
        self.mixers, self.mixer_at, self.convs = mixers, 0, 0
        self.node_k, self.node_v, self.at = node_k, node_v, 0

    def mask(self, named: dict[str, Any]) -> None:
        """Called by a module that passes on its mask's dimensions. Returns None as the mask."""

    def attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, named: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        call = self._next(module, query, key, value, mask, named)
        spec, kind = call.spec, self.node_k[0].dtype
        if spec.shares is None:
            self.node_k[call.layer].copy_(key[0].transpose(0, 1))
            self.node_v[call.layer].copy_(value[0].transpose(0, 1))
        # rows of q may lie apart, the heads of a row may not
        q = query[0].transpose(0, 1).to(kind).contiguous()
        if spec.is_plain and (spec.heads, spec.kv_heads, spec.head_dim) == self.plain:
            out = self.attend(call.layer, q, spec.scale)
        else:
            sinks = named["s_aux"] if spec.sinks else None
            out = self.attend(call.layer, q, None, spec.properties, sinks)
        # contiguous, since a family views it in other shapes
        return out.to(query.dtype).contiguous()[None]

    def mixer(self, name: str, own: Callable, named: dict[str, Any]) -> Any:
        at = self.mixer_at
        call = self.mixers[at] if at < len(self.mixers) else None
        size = size_of(name, named)
        if call is None or (call.function, call.size) != (name, size):
            due = "none" if call is None else str(call)
            raise RuntimeError(
                f"call {at + 1} of a layer with a state is {name} of {size}, expected {due}: the "
                "module computes in another order than in its test pass"
            )
        self.mixer_at += 1
        convolution = name == CONVOLUTION
        number = self.convs if convolution else at - self.convs
        self.convs += convolution
        return answer(call, number, own, named, self.attend.states)

    def _next(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, named: dict[str, Any],
    ) -> Call:  # fmt: skip
        call = self.calls[self.at] if self.at < len(self.calls) else None
        if call is None or call.module() is not module:
            due = "none" if call is None else call.place
            raise RuntimeError(
                f"attention call {self.at + 1} of a pass is of a {type(module).__name__}, "
                f"expected {due}: the module calls attention in another order than in its test "
                "pass"
            )
        self.at += 1
        self._check(call, query, key, value, mask, named)
        return call

    def _check(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        mask: torch.Tensor | None, named: dict[str, Any],
    ) -> None:  # fmt: skip
        """Raises RuntimeError if a call differs from the probed one."""
        spec, rows = call.spec, query.shape[2]
        if mask is not None and mask.numel() != 1:
            raise RuntimeError(f"{call.place} uses its own attention mask, of shape {mask.shape}")
        scale, softcap = named.get("scaling"), named.get("softcap")
        for what, want, got in (
            ("queries", (1, spec.heads, rows, spec.head_dim), query.shape),
            ("keys", (1, spec.kv_heads, rows, spec.head_dim), key.shape),
            ("values", (1, spec.kv_heads, rows, spec.value_dim), value.shape),
            ("scale", spec.scale, query.shape[3] ** -0.5 if scale is None else scale),
            ("softcap", spec.softcap, softcap),
            ("sinks", spec.sinks, named.get("s_aux") is not None),
        ):
            if want != got:
                raise RuntimeError(
                    f"{call.place} must call attention with {what} {want}, as in its test pass, "
                    f"got {got}"
                )

    def end(self) -> None:
        """Raises RuntimeError unless all calls were made."""
        if self.at != len(self.calls):
            raise RuntimeError(
                f"a pass must make {len(self.calls)} attention calls, as in the module's test "
                f"pass, got {self.at}"
            )
        if self.mixer_at != len(self.mixers):
            raise RuntimeError(
                f"a pass must make {len(self.mixers)} calls of layers with a state, as in the "
                f"module's test pass, got {self.mixer_at}"
            )
