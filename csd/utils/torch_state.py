"""Process-wide and thread-wide state of torch: set for csd's own code, and restored after it.

A sample is a function of its model, prompt and seed, so it may not depend on the autocast, default
dtype or precision of products around the call. csd draws in the dtype of the weights. A user's
function that is called meanwhile has the caller's state (`callers_state`, `calling`).
"""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from csd.utils.device import computed_in, usable_cpus

T = TypeVar("T")
P = ParamSpec("P")
# device types with their own autocast
_KINDS = ("cpu", "cuda", "xpu", "mps")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_thread = threading.local()


@dataclass(frozen=True)
class _State:
    """State of this thread and process; each part is set only where it differs."""

    grad: bool
    inference: bool
    dtype: torch.dtype  # of tensors that are made without one
    device: torch.device  # likewise
    autocast: tuple[torch.dtype | None, ...]  # per kind of device; None: off
    # precision of float32 products, in oneDNN and in cuBLAS
    precision: tuple[str, str]
    # kernels that scaled_dot_product_attention may use
    attention: tuple[bool, ...]
    threads: int

    @classmethod
    def now(cls) -> "_State":
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            tuple(
                torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in _KINDS
            ),
            tuple(backend.fp32_precision for backend in _backends()),
            tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION),
            torch.get_num_threads(),
        )


_PLAIN = _State(
    False,
    False,
    torch.float32,
    torch.device("cpu"),
    (None,) * len(_KINDS),
    ("ieee", "ieee"),
    (True,) * len(_ATTENTION),
    1,
)


def _backends() -> tuple[Any, Any]:
    # torch's type stubs lack the first
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul, torch.backends.cuda.matmul


class plain_torch(ContextDecorator):
    """Context without autocast, gradients, inference mode, and defaults other than torch's own.

    Also a decorator. Products of float32 are in float32. PyTorch has at most as many threads as the
    process may use CPUs.
    """

    def __enter__(self) -> None:
        before = _State.now()
        self._outer = getattr(_thread, "caller", None)
        self._stack = ExitStack()
        try:
            self._stack.enter_context(_eager())
            plain = replace(_PLAIN, threads=min(before.threads, usable_cpus()))
            self._stack.enter_context(_switched(before, plain))
        except BaseException:
            self._stack.close()
            raise
        _thread.caller = before

    def __exit__(self, *exc: Any) -> None:
        _thread.caller = self._outer
        # an exception that passes is not handed on: it may refuse that anything is set in it
        self._stack.close()

    def _recreate_cm(self) -> "plain_torch":
        # one of its own for each call of a decorated function
        return plain_torch()


def _eager() -> AbstractContextManager[Any]:
    """Context in which modules that were compiled run as they were written.

    csd calls a module with other arguments than its user, and replaces functions that it calls.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def callers_state() -> AbstractContextManager[Any]:
    """Context with the state that was around the innermost `plain_torch`."""
    caller = getattr(_thread, "caller", None)
    return nullcontext() if caller is None else _switched(_State.now(), caller)


class calling(AbstractContextManager[None]):
    """Context of a call of the user's function `name`, in `callers_state`.

    A generator around the call would take some errors for its own end, and lose them or others'
    work. Like Python (PEP 479), this turns them into a RuntimeError.
    """

    # no @contextmanager: contextlib sets attributes of the error, which its class may forbid
    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        self._state = callers_state()
        self._state.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state.__exit__(None, None, None)
        if isinstance(error, GeneratorExit | StopIteration | StopAsyncIteration):
            raise RuntimeError(f"{self._name} raised {type(error).__name__}") from error


def _switched(now: _State, to: _State) -> AbstractContextManager[Any]:
    """Switches to a state; the context restores the one before."""
    with ExitStack() as stack:
        if now.inference != to.inference:
            # sets gradients as well, so it comes first
            stack.enter_context(torch.inference_mode(to.inference))
        if torch.is_grad_enabled() != to.grad:
            stack.enter_context(torch.set_grad_enabled(to.grad))
        for kind, old, new in zip(_KINDS, now.autocast, to.autocast, strict=True):
            if old != new:
                stack.enter_context(torch.autocast(kind, dtype=new, enabled=new is not None))
        if now.device != to.device:
            stack.enter_context(to.device)
        if now.dtype != to.dtype:
            torch.set_default_dtype(to.dtype)
            stack.callback(torch.set_default_dtype, now.dtype)
        for backend, had, wants in zip(_backends(), now.precision, to.precision, strict=True):
            if had != wants:
                backend.fp32_precision = wants
                stack.callback(setattr, backend, "fp32_precision", had)
        for name, was, wanted in zip(_ATTENTION, now.attention, to.attention, strict=True):
            if was != wanted:
                enable = getattr(torch.backends.cuda, f"enable_{name}_sdp")
                enable(wanted)
                stack.callback(enable, was)
        if now.threads != to.threads:
            torch.set_num_threads(to.threads)
            stack.callback(torch.set_num_threads, now.threads)
        # closed without the exception that passes
        return closing(stack.pop_all())


def in_plain_torch(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """Wrap a generator function: its items are computed in `plain_torch`, and used in the state of
    their user."""

    @wraps(function)
    def generate(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        yield from computed_in(plain_torch, function(*args, **kwargs))

    return generate


def version_of(x: torch.Tensor) -> int:
    """Number of writes in place that PyTorch counted; 0 for tensors of inference mode."""
    return 0 if x.is_inference() else x._version
