"""The decoder that computes a module's log-probabilities, exact where the module can be."""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from csd.engine.engine import Engine, engines_of
from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.rules.tables import asked_by
from csd.gradient.fused import FusedPass
from csd.gradient.head import Head, Scoring, scores
from csd.gradient.rows import Rows
from csd.kernels.attention.packed import PackedLayout, packed_attention
from csd.kernels.backends import choose
from csd.models.exact import exact_decoder
from csd.models.exact_products import ExactProducts
from csd.models.fused.decoder import Decoder, HybridDecoder
from csd.models.load import Loaded, load
from csd.models.lora import state_of, tuner_layers
from csd.models.module.decoder import ModuleDecoder, Pass
from csd.models.redirect import AttentionArgs, calls_go_to
from csd.models.text_model import unwrapped


def _module_logits(decoder: ModuleDecoder, rows: Rows) -> torch.Tensor:
    """Logits [R, V] of one differentiable pass of a user's own module: the prompt runs once.

    The module computes all but its attention. Its products take any number of rows, so values equal
    those of the module's sampling up to rounding.
    """
    ids, position = rows.token.long()[None], rows.position.long()[None]
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)

    def once() -> torch.Tensor:
        answer = _PackedPass(decoder, rows)
        with calls_go_to(answer, decoder.parts):
            logits: torch.Tensor = decoder.run(ids, position, mask)
        answer.end()
        return logits[0]

    return decoder.adapters.run(once)


class _PackedPass(Pass):
    __slots__ = ("kv", "rows")

    def __init__(self, decoder: ModuleDecoder, rows: Rows):
        super().__init__(decoder.calls, None, None, None, None)
        self.rows = rows
        # keys and values by call, for later calls that share them
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attention(self, args: AttentionArgs) -> torch.Tensor:
        spec, (_, query, key, value, _, named) = self._next(args).spec, args
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.kv.append(own if spec.shares is None else self.kv[spec.shares])
        sinks = named["s_aux"] if spec.sinks else None
        out = packed_attention(
            query[0].transpose(0, 1),
            *self.kv[-1],
            PackedLayout(self.rows.end, self.rows.position),
            spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=spec.softcap,
            sinks=sinks,
        )[0]
        return out.to(query.dtype).contiguous()[None]


# prompt tokens per pass of an engine, by default
CHUNK = 512
# by module, then by backend and active adapters
_policies: "weakref.WeakKeyDictionary[nn.Module, dict[tuple, Policy]]" = weakref.WeakKeyDictionary()
# by backend and kind, with the row blocks that are tried once per shape
_products: dict[tuple[str, str | None], ExactProducts] = {}


@dataclass(slots=True)
class Policy:
    """A module's decoder and operations. why: the reason for which values are not exact.

    kernels: as in `csd.Engine`. kind: "cublas" for its products, None for the backend's own.
    """

    loaded: Loaded
    kernels: str | None
    kind: str | None
    ops: Any = None
    decoder: Any = None
    why: str | None = None

    def refresh(self) -> None:
        """Bring the decoder up to date with the module, which may have been cast or moved."""
        loaded = self.loaded
        if not loaded.refresh() and self.decoder is not None:
            return
        ops, decoder = choose(self.kernels, loaded.device, loaded.dtype), loaded.decoder
        if isinstance(decoder, HybridDecoder) or getattr(decoder, "mixers", None):
            raise NotImplementedError(
                f"model must have no layers with a state, got a {loaded.config.family}: their "
                "state after a prompt has no gradient in csd"
            )
        self.ops = ops if ops.exact is None else ops.exact()
        self.decoder, self.why = decoder, None
        if not isinstance(self.decoder, Decoder):
            self.why = f"the module itself computes the rows: {self.decoder.why}"
            return
        key = self.ops.name, self.kind
        products = _products.setdefault(key, ExactProducts.beside(self.ops, self.kind))
        try:
            self.decoder = exact_decoder(loaded, self.ops, products)
        except ValueError as error:
            self.why = str(error)

    def why_with(self, params: SamplingParams) -> str | None:
        """The reason for which values with these parameters are not exact, if any."""
        request = Request.of(0, [0], params, range(1), 0)
        if self.why is None and self.loaded.device.type == "cuda" and asked_by([request]):
            return (
                "PyTorch adds up the rows that constraints change, on a GPU in an order that "
                "depends on their number"
            )
        return self.why

    def values(
        self,
        module: nn.Module,
        rows: Rows,
        params: SamplingParams,
        *,
        chunk: int,
        entropy: bool,
        recompute: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities, raw ones and, if wanted, entropies [T] of the rows' tokens."""
        decoder, c = self.decoder, self.decoder.config
        wide = torch.promote_types(self.loaded.dtype, torch.float32)
        weights: list[torch.Tensor] = []
        decoder.begin_call()
        if isinstance(decoder, ModuleDecoder):
            if recompute:
                raise NotImplementedError(
                    f"checkpoint must be False for a model whose module computes the rows: "
                    f"{self.why}"
                )
            hidden, head = _module_logits(decoder, rows), Head(plain=True)
        else:
            run = FusedPass(module, decoder, self.ops, chunk)
            hidden, head = run.hidden(rows, recompute), Head(c.logit_divisor, c.final_cap)
            weights = [run.head, *run.head_stacks]
        scoring = Scoring(rows, params, decoder.logits, self.ops, c.vocab, wide, entropy)
        return scores(scoring, head, hidden, weights)


class PolicySource(NamedTuple):
    """Module of a model, and its policy."""

    module: nn.Module
    policy: Policy  # up to date with the module
    chunk: int  # prompt tokens per pass of the engine
    tokenizer: Any  # of the engine, else of the module's folder; None without one
    differs: str | None  # the reason for which an engine's samples have other bits


def policy_of(model: Any) -> PolicySource:
    """Module and policy of a model.

    model: a `transformers` model, one in wrappers, or an `Engine` of one.

    Raises TypeError for anything whose parameters csd cannot reach, and as `csd.models.load.load`.
    """
    engine = model if isinstance(model, Engine) else None
    module = unwrapped(model if engine is None else engine.module)
    if not isinstance(module, nn.Module):
        raise TypeError(
            "model must be a transformers model, or a csd.Engine made of one, whose parameters "
            f"get the gradients, got {type(module).__name__}"
        )
    kernels, kind = (None, None) if engine is None else (engine.ops.name, engine.model.kind)
    policies = _policies.setdefault(module, {})
    key = kernels, kind, state_of(tuner_layers(module.modules()))
    if key not in policies:
        loaded = load(module, decoder="auto")
        loaded.held = None
        policies[key] = Policy(loaded, kernels, kind)
    policy = policies[key]
    policy.refresh()
    if engine is None:
        others = (_difference(policy, other) for other in engines_of(module) if other.exact)
        differs = next(filter(None, others), None)
        return PolicySource(module, policy, CHUNK, policy.loaded.own_tokenizer(), differs)
    inexact = "the engine is not exact: bits of its samples depend on drafts and batch"
    differs = None if engine.exact else inexact
    tokenizer = engine.tokenizer or policy.loaded.own_tokenizer()
    return PolicySource(module, policy, engine.caches.prefill_chunk, tokenizer, differs)


def _difference(policy: Policy, engine: Engine) -> str | None:
    """The setting of an exact engine for which samples have other bits than values, if any."""
    settings: list[tuple[str, Any, Any]] = [
        ("kernels", policy.ops.name, engine.ops.name),
        ("exact", policy.kind or True, engine.model.kind or True),
    ]
    # on a CPU a prompt's bits do not depend on how it is cut (`csd/kernels/attention/prompt.py`)
    if engine.device.type != "cpu":
        settings.append(("prefill_chunk", CHUNK, engine.caches.prefill_chunk))
    for name, own, other in settings:
        if own != other:
            return (
                f"an engine of this model has {name}={other!r}, and values are computed with "
                f"{name}={own!r}: pass the engine as model"
            )
    return None
