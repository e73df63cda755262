"""Decoder that runs the user's own module over the pool's rows, with csd's attention.

The rows are one sequence of token ids with explicit positions. There is no cache object, and a mask
of one element, which transformers passes on as it is, stands for all masks. Each attention call
writes its keys and values to the step's scratch, and csd computes its result, as it does for calls
of layers with a state (`Pass`; `csd/models/redirect.py` redirects the calls). All else is the
module's: layers, hooks, adapters, quantised products, caps and multipliers of its head. Nothing of
it is copied or rebound, so a training step or another adapter takes effect in the next pass.
"""

import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from csd.kernels.ops import Ops
from csd.models.attributes import OUTPUTS, Attributes, changed
from csd.models.fused.fusable import hooks_of
from csd.models.lora import Adapters, base_of, tuner_layers
from csd.models.module.mixers import MixerCall, answer, size_of
from csd.models.module.probe import AttentionCall, probe
from csd.models.module.sizes import NamedSizes, probed_sizes
from csd.models.redirect import CONVOLUTION, AttentionArgs, Parts, calls_go_to
from csd.models.refuse import refuse_module

ROWS = 5
# implementation of transformers' experts that keeps rows and offsets on the device
EXPERTS = "grouped_mm"


class _Shapes:
    """Attention without values: returns results of the right shape."""

    def mask(self, named: dict[str, Any]) -> None:
        pass

    def attention(self, args: AttentionArgs) -> torch.Tensor:
        _, heads, rows, _ = args.query.shape
        return args.query.new_empty(1, rows, heads, args.value.shape[3])

    def mixer(self, name: str, own: Callable, named: dict[str, Any]) -> Any:
        return own(**named)


@torch.no_grad()
def host_read_of(base: nn.Module, parts: Parts) -> str | None:
    """Description of the operation in a pass that reads values on the host, or None.

    The pass runs on meta tensors, which have no values: any read raises, wherever it is in the
    module. Experts run as they do in a captured step.
    """
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


class Pass:
    """Computes the calls of one pass, which must come in the probed order."""

    def __init__(
        self,
        calls: list[AttentionCall],
        plain: tuple[int, int, int] | None,
        attend: Any,
        node_k: Any,
        node_v: Any,
        mixers: Sequence[MixerCall] = (),
    ):
        self.calls, self.plain, self.attend = calls, plain, attend
        # number of mixer calls so far, and of the convolutions among them
        self.mixers, self.mixer_at, self.convs = mixers, 0, 0
        self.node_k, self.node_v, self.at = node_k, node_v, 0

    def mask(self, named: dict[str, Any]) -> None:
        """Called by a module that passes on its mask's dimensions. Returns None as the mask."""

    def attention(self, args: AttentionArgs) -> torch.Tensor:
        call, (_, query, key, value, _, named) = self._next(args), args
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
        index = self.mixer_at
        call = self.mixers[index] if index < len(self.mixers) else None
        size = size_of(name, named)
        if call is None or (call.function, call.size) != (name, size):
            due = "none" if call is None else str(call)
            raise RuntimeError(
                f"call {index + 1} of a layer with a state is {name} of {size}, expected {due}: "
                "the module computes in another order than in its test pass"
            )
        self.mixer_at += 1
        convolution = name == CONVOLUTION
        number = self.convs if convolution else index - self.convs
        self.convs += convolution
        return answer(call, number, own, named, self.attend.states)

    def _next(self, args: AttentionArgs) -> AttentionCall:
        call = self.calls[self.at] if self.at < len(self.calls) else None
        if call is None or call.module() is not args.module:
            due = "none" if call is None else call.place
            raise RuntimeError(
                f"attention call {self.at + 1} of a pass is of a {type(args.module).__name__}, "
                f"expected {due}: the module calls attention in another order than in its test "
                "pass"
            )
        self.at += 1
        self._check(call, args)
        return call

    def _check(self, call: AttentionCall, args: AttentionArgs) -> None:
        """Raises RuntimeError if a call differs from the probed one."""
        _, query, key, value, mask, named = args
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
        taken = inspect.signature(inspect.unwrap(type(self.base).forward)).parameters
        self._keeps_logits = False
        self.captured = False  # whether its steps are, or may be, recorded in graphs
        self._places: list[int] = []  # addresses of its tensors while steps are recorded
        self._mask: torch.Tensor | None = None
        self.admission: Any = None  # the `Admission` that `csd.models.module.admit` measured
        named, before = NamedSizes.of(self.base), Attributes.of(self.parts.modules)
        probed = probe(self.base, self.parts, self.run, tokens=named.vocab, context=named.context)
        self.calls: list[AttentionCall] = probed.calls
        self.mixers = probed.mixers
        # with logits_to_keep, layers that share keys may leave out rows of a prompt too
        shared = any(call.spec.shares is not None for call in self.calls)
        self._keeps_logits = "logits_to_keep" in taken and not shared
        self.device, self.dtype = probed.device, probed.dtype
        self.config = probed_sizes(named, probed)
        # names of attributes that a pass itself writes, such as counters: no sign of another model
        self.written = changed(before, Attributes.of(self.parts.modules))
        self._facts = _facts(model, self.written)

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
        result = held()
        if result is None:
            raise RuntimeError("the model of this decoder has been deleted: keep a reference to it")
        return result

    @cached_property
    def why_not_static(self) -> str | None:
        """Operation of a pass that reads on the host, which no graph can record; None if none."""
        return host_read_of(self.base, self.parts)

    def capture(self, captured: bool) -> None:
        """Begin or end the recording of steps, which hold addresses of the module's tensors."""
        self.captured, self._places = captured, _places(self.base) if captured else []

    @property
    def graph_key(self) -> tuple:
        """State on which a recorded step depends in addition to its sizes: that of the adapters."""
        return self.adapters.state, self.adapters.values

    def is_current(self) -> bool:
        """True if the module still has the parts, hooks, attributes and configs that were probed.

        While steps are recorded, it must also have the same tensors.
        """
        moved = self.captured and self._places != _places(self.base)
        return not moved and self._facts == _facts(self.model, self.written)

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

        def once() -> Any:
            answer = Pass(self.calls, self.config.of_calls, attend, node_k, node_v, self.mixers)
            experts = captured_experts(self.parts) if self.captured else nullcontext()
            with calls_go_to(answer, self.parts), experts:
                logits = self.run(ids, position.long()[None], self._mask, only)
            answer.end()
            return logits[0]

        return self.adapters.run(once)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `hidden`, which are the logits of `forward`: the head is part of the module."""
        return hidden

    def run(
        self,
        ids: torch.Tensor,
        position: torch.Tensor,
        mask: torch.Tensor | None,
        only: int | None = None,
    ) -> Any:
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


def _facts(model: Any, written: Collection[str]) -> tuple:
    """Properties that a probe depends on: parts, hooks, replaced methods, and the attributes of all
    modules but the adapters' layers; not weights.

    written: names that a pass writes.
    """
    modules = [*base_of(model).modules()]
    parts = tuple((id(m), hooks_of(m), "forward" in vars(m)) for m in modules)
    adapted = {*map(id, tuner_layers(modules))}
    own = Attributes.of([m for m in modules if id(m) not in adapted], written)
    weight = next(base_of(model).parameters())
    return parts, weight.device, weight.dtype, own.values
