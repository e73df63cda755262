"""Probe of a module: one forward pass that records the properties of its calls.

The module's own attention function computes the calls. Named arguments other than scale, cap and
sinks are passed on to it; `csd.models.module.admit` compares csd's attention with that function,
so a property that is not listed here is refused there.

The window or chunk of a call is that of its mask, a function of transformers: causal alone, causal
within a window, or within chunks. The mask function is evaluated at positions around 2^20, farther
than any window, and at the borders of the window or chunk that these values suggest. The other
arguments of an attention call do not decide: Llama 4 passes its chunks in none of them.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csd.kernels.attention.reference import Properties
from csd.models.module.mixers import MixerCall, OtherCall, size_of
from csd.models.redirect import (
    CONVOLUTION,
    AttentionArgs,
    Parts,
    calls_go_to,
    own_function,
    owner_of,
    put_in_front,
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Properties of a call, as `csd.models.module.probe` determines them."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # most keys that a row sees, its own included
    chunk: int | None = None  # a row sees keys with the same position // chunk
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    sinks: bool = False  # one more score per head, without a value
    shares: int | None = None  # index of an earlier call whose keys and values are used

    @property
    def width(self) -> int:
        """Numbers of a token's keys or of its values, whichever are more."""
        return self.kv_heads * max(self.head_dim, self.value_dim)

    @property
    def is_plain(self) -> bool:
        """True if the tree attention of every backend supports all of the call's properties."""
        of_positions = self.window is not None or self.chunk is not None
        of_scores = self.softcap is not None or self.sinks
        # the maximum is taken before scores are scaled, so the scale must be positive
        same = self.value_dim == self.head_dim
        return same and self.scale > 0 and not (of_positions or of_scores)

    @property
    def properties(self) -> Properties:
        return Properties(
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.scale,
            self.window,
            self.chunk,
            self.softcap,
        )

    def __str__(self) -> str:
        parts = [f"{self.heads} heads", f"{self.kv_heads} for keys", f"{self.head_dim} numbers"]
        if self.value_dim != self.head_dim:
            parts.append(f"{self.value_dim} of values")
        parts.append(f"scale {self.scale:.4g}")
        for name in ("window", "chunk", "softcap", "shares"):
            if getattr(self, name) is not None:
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join([*parts, *["sinks"] * self.sinks])


# length of the text that is read; no window is shorter
TOKENS = 11
# arguments that change the result of a call and have no counterpart in csd
UNKNOWN = ("position_bias", "cache", "head_mask", "block_mask", "cu_seq_lens_q")
# exceptions of a module that cannot run a pass of csd
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class NotAdmitted(ValueError):
    """Error for a module that csd does not run, naming the property, its place and a remedy."""


@dataclass(slots=True)
class AttentionCall:
    """An attention call in a pass of a module."""

    place: str  # name of the module, and number of the call if it has several
    module: weakref.ref
    spec: AttentionSpec
    mask_function: Callable | None
    # named arguments that do not depend on the text; dropped with mask_function after admission
    named: dict[str, Any]
    device: torch.device
    layer: int  # layer of the cache that has its keys and values


@dataclass(slots=True)
class Probed:
    calls: list[AttentionCall]
    mixers: list[MixerCall]  # calls of layers with a state
    vocab: int
    dtype: torch.dtype  # of queries
    device: torch.device


def probe(
    model: Any,
    parts: Parts,
    run: Callable[[torch.Tensor, torch.Tensor, None], Any],
    *,
    tokens: int,
    context: int,
) -> Probed:
    """Run one pass of a model and record its calls. Raises NotAdmitted.

    run: calls the model with token ids [1, T], positions [1, T] and no mask. tokens: size of its
    vocabulary. context: its number of positions.
    """
    device = next(model.parameters()).device
    position = torch.arange(TOKENS, device=device)[None]
    # they differ if the vocabulary allows it
    ids = (position * 7 + 3) % tokens
    noted = _Noted(model, device, context)
    put_in_front(parts.modules)
    with torch.no_grad(), calls_go_to(noted, parts), refusing(model):
        logits = run(ids, position, None)
    if not noted.calls:
        raise NotAdmitted(
            f"{type(model).__name__} does not get its attention from transformers' "
            "AttentionInterface: a pass called no attention there"
        )
    if not torch.is_tensor(logits) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        shape = tuple(logits.shape) if torch.is_tensor(logits) else type(logits).__name__
        raise NotAdmitted(
            f"{type(model).__name__} must return logits of shape (1, {TOKENS}, vocabulary), got "
            f"{shape}; load the model with AutoModelForCausalLM"
        )
    query = noted.held[0][0]
    return Probed(noted.calls, noted.mixers, logits.shape[-1], query.dtype, query.device)


@contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Turns a module's error in a pass of csd into NotAdmitted, except for a lack of memory."""
    try:
        yield
    except (NotAdmitted, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        what = f"{type(error).__name__}: {error}"
        raise NotAdmitted(f"{type(model).__name__} fails in csd's test pass: {what}") from error


class _Noted:
    """Computes calls with the module's own functions, and records them."""

    def __init__(self, model: nn.Module, device: torch.device, context: int):
        self.names = {module: name for name, module in model.named_modules()}
        self.device, self.context = device, context
        self.model = weakref.ref(model)
        self.calls: list[AttentionCall] = []
        self.mixers: list[MixerCall] = []
        self.masks: list[tuple[torch.Tensor, Callable]] = []
        # queries, keys and values, so that no later tensor takes the memory of an earlier one
        self.held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.places: list[list[tuple]] = []  # shapes, strides and addresses of keys and values
        self.kinds: dict[int, tuple[int | None, int | None]] = {}

    def mask(self, named: dict[str, Any]) -> torch.Tensor:
        from transformers.masking_utils import sdpa_mask

        off = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        made = sdpa_mask(**named | off)
        assert made is not None
        self.masks.append((made, named["mask_function"]))
        return made

    def attention(self, args: AttentionArgs) -> torch.Tensor:
        module, query, key, value, mask, named = args
        module_name = self._place(module)
        if query.shape[:1] + query.shape[2:3] != (1, TOKENS) or key.shape[2] != TOKENS:
            raise NotAdmitted(
                f"{module_name} attends from {query.shape[2]} rows to {key.shape[2]} keys in a "
                f"text of {TOKENS} tokens: csd supports decoders that attend to their own text"
            )
        for name in UNKNOWN:
            if named.get(name) is not None:
                text = f"{module_name} calls attention with {name}"
                raise NotAdmitted(f"{text}, which csd does not support")
        function = self._mask_function(module_name, mask)
        window, chunk = self._kind(module_name, function)
        scale, softcap = named.get("scaling"), named.get("softcap")
        memory = [(x.shape, x.stride(), x.data_ptr()) for x in (key, value)]
        shares = self.places.index(memory) if memory in self.places else None
        spec = AttentionSpec(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scale is None else scale),
            window=window,
            chunk=chunk,
            softcap=None if softcap is None else float(softcap),
            sinks=named.get("s_aux") is not None,
            shares=shares,
        )
        self.held.append((query, key, value))
        self.places.append(memory)
        numbers = {k: v for k, v in named.items() if k == "s_aux" or not torch.is_tensor(v)}
        if shares is None:
            layer = sum(call.spec.shares is None for call in self.calls)
        else:
            layer = self.calls[shares].layer
        of_call = module_name, weakref.ref(module)
        self.calls.append(AttentionCall(*of_call, spec, function, numbers, query.device, layer))
        return by_own_function(args)

    def mixer(self, name: str, own: Callable, named: dict[str, Any]) -> Any:
        # a core follows its mixer's convolution
        owner = self.mixers[-1].place if self.mixers else name
        if name == CONVOLUTION:
            model = self.model()
            assert model is not None
            owner = owner_of(model, named["weight"])
        try:
            size = size_of(name, named)
        except OtherCall as error:
            raise NotAdmitted(f"{owner} calls {error}") from error
        device = next(x for x in named.values() if torch.is_tensor(x)).device
        self.mixers.append(MixerCall(owner, name, size, device, own, named))
        return own(**named)

    def _place(self, module: nn.Module) -> str:
        name = self.names.get(module, type(module).__name__)
        before = sum(call.module() is module for call in self.calls)
        return f"{name} (call {before + 1})" if before else name

    def _mask_function(self, name: str, mask: torch.Tensor | None) -> Callable:
        for made, function in self.masks:
            if mask is not None and mask.data_ptr() == made.data_ptr():
                return function
        what = "no mask" if mask is None else "a mask of its own"
        raise NotAdmitted(
            f"{name} calls attention with {what}: csd supports modules whose masks are made by "
            "transformers.masking_utils"
        )

    def _kind(self, name: str, function: Callable) -> tuple[int | None, int | None]:
        if id(function) not in self.kinds:
            try:
                kind = window_and_chunk(function, self.device)
            except OtherMask as error:
                raise NotAdmitted(f"{name}: {error}") from error
            # a window or chunk longer than every text hides nothing
            window, chunk = (x if x is not None and x < self.context else None for x in kind)
            self.kinds[id(function)] = window, chunk
        return self.kinds[id(function)]


def by_own_function(args: AttentionArgs) -> torch.Tensor:
    """The module's attention without csd, [1, M, H, Dv]; the mask is bool [1, 1, M, T]."""
    module, query, key, value, mask, named = args
    assert mask is not None
    name, own = own_function(module, named)
    if name == "eager":
        # a mask that is added to scores
        added = torch.zeros_like(mask, dtype=query.dtype)
        mask = added.masked_fill(~mask, torch.finfo(query.dtype).min)
    result: torch.Tensor = own(module, query, key, value, mask, **named | {"dropout": 0.0})[0]
    return result


FAR = 1 << 20
# tokens that are checked on both sides of a border
NEAR = 70


class OtherMask(ValueError):
    """A mask that is neither causal nor causal within a window or chunks."""


def window_and_chunk(
    mask_function: Callable, device: torch.device
) -> tuple[int | None, int | None]:
    """Window and chunk, in tokens, of a mask function of `transformers.masking_utils`.

    At least one of the two is None. Raises OtherMask for a mask of another kind.
    """
    mask = _Mask(mask_function, device)
    seen = mask.seen(range(FAR, FAR + 1), range(FAR + 1))
    if not seen.any():
        raise OtherMask(f"its mask hides all tokens from row {FAR}")
    first = int(seen.int().argmax())
    if first == 0:
        mask.check(None, None)
        return None, None
    # number of rows from FAR on that see the key: 1 for a window, the rest of the chunk for chunks
    rows = int(mask.seen(range(FAR, 2 * FAR), range(first, first + 1)).int().cumprod(0).sum())
    window, chunk = FAR - first + 1, FAR - first + rows
    if rows == 1 and mask.is_like(window, None):
        return window, None
    mask.check(None, chunk)
    return None, chunk


@dataclass(slots=True)
class _Mask:
    function: Callable
    device: torch.device

    def seen(self, rows: range, keys: range) -> torch.Tensor:
        """Flat bool tensor: whether rows see keys, one of the two having one element."""
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        row, key = (torch.arange(x.start, x.stop, device=self.device) for x in (rows, keys))
        try:
            visible = self.function(zero, zero, row[None, None, :, None], key[None, None, None])
        # the function may index a tensor of the text's length
        except (IndexError, RuntimeError, TypeError) as error:
            raise OtherMask(f"its mask depends on more than positions: {error}") from error
        return visible.expand(1, 1, row.numel(), key.numel()).flatten().cpu()

    def check(self, window: int | None, chunk: int | None) -> None:
        if not self.is_like(window, chunk):
            raise OtherMask("its mask is neither causal, nor a sliding window, nor chunked")

    def is_like(self, window: int | None, chunk: int | None) -> bool:
        size = window or chunk or 100
        for row in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, FAR - 1, FAR, FAR + 1):
            first = 0 if window is None else max(0, row - window + 1)
            first = first if chunk is None else row // chunk * chunk
            for border in (first, row):
                keys = range(max(0, border - NEAR), border + NEAR)
                want = torch.tensor([first <= key <= row for key in keys])
                if not torch.equal(self.seen(range(row, row + 1), keys), want):
                    return False
        return True
