"""The current model of an engine, with the operations that run it."""

import os
from contextlib import nullcontext
from typing import Any, Literal

import torch

from csd.engine.first_call.check import require_check
from csd.engine.requests.request import Request
from csd.engine.resources.weights import ModelKey, model_key, model_state
from csd.kernels.backends import check_arithmetic, choose
from csd.models.exact import any_threads, choose_exact
from csd.models.exact_products import ExactProducts
from csd.models.fused.config import ModelSizes
from csd.models.fused.decoder import Decoder, DecoderLike
from csd.models.fused.held import weights_hash
from csd.models.load import Loaded, load
from csd.models.module.decoder import ModuleDecoder
from csd.models.portable import PORTABLE, first_other
from csd.traces.receipt import Receipt, receipt_of
from csd.utils.phases import phase
from csd.utils.torch_state import plain_torch


class EngineModel:
    """A loaded model and the operations that run it, both replaced by `take`.

    model, kernels, exact, static, self_check: as in `csd.Engine`. options: of
    `csd.models.load.load`.
    """

    loaded: Loaded
    decoder: DecoderLike
    device: torch.device
    dtype: torch.dtype
    exact: bool  # the value in use, as `static`
    static: bool
    _threads_agree: dict[int, bool]  # results of `any_threads` for this model, by their number
    _key: ModelKey | None  # None until it is first used in a run
    _hash: tuple[ModelKey, str | None] | None  # `weights_hash` of a key

    @plain_torch()
    def __init__(
        self,
        model: Any,
        *,
        kernels: str | None,
        exact: bool | Literal["cublas", "portable"] | None,
        static: bool | None,
        self_check: bool,
        **options: Any,
    ):
        checked = not self_check

        def check_kernels(on: torch.device, kind: torch.dtype, config: ModelSizes) -> None:
            nonlocal checked
            if kernels != "reference":
                check_arithmetic(on, kind)
            if not checked and on.type == "cuda" and kernels != "reference":
                # Triton's kernels are exact only if `exact` requests it
                require_check(on, kind, config, bool(exact))
                checked = True

        by_name = isinstance(model, str | os.PathLike)
        with phase(f"loading {model}", None) if by_name else nullcontext():
            loaded = load(model, before=check_kernels, **options)
        self.kernels, self._exact, self._static = kernels, exact, static
        self._quantization = options.get("quantization")
        self.dtype = loaded.dtype
        self.ops = choose(kernels, loaded.device, loaded.dtype)
        self._products = ExactProducts.beside(self.ops, exact)
        self.take(loaded)
        if self.exact and self.ops.exact is not None:
            self.ops = self.ops.exact()
        check_kernels(self.device, self.dtype, self.decoder.config)

    def take(self, loaded: Loaded) -> None:
        """Run another loaded model from now on."""
        self.loaded = loaded
        if loaded.dtype != self.dtype and loaded.device.type == "cpu":
            # the module was cast, and loops exist for some dtypes only
            self.ops = choose(self.kernels, loaded.device, loaded.dtype)
        self.static = self._whether_static(loaded)
        self.decoder, self.exact = choose_exact(self._exact, loaded, self.ops, self._products)
        self.device, self.dtype = loaded.device, loaded.dtype
        self._threads_agree, self._key, self._hash = {}, None, None

    def _whether_static(self, loaded: Loaded) -> bool:
        """True if steps have fixed shapes. Raises ValueError if static=True is impossible."""
        on_gpu, ops = loaded.device.type == "cuda", self.ops
        if self._static and on_gpu and ops.reads_device:
            raise ValueError(f"static must be False with kernels={ops.name!r} on a GPU, got True")
        static = on_gpu and not ops.reads_device if self._static is None else self._static
        if isinstance(loaded.decoder, ModuleDecoder):
            why = loaded.decoder.why_not_static if static else None
            if why is not None and self._static:
                raise ValueError(f"static must be False for this module, got True: {why}")
            static = static and why is None
            loaded.decoder.capture(static)
        return static

    def load(self, folder: str) -> Loaded:
        """The weights of a folder in this model's dtype and on its device, for `take`; with the
        folder's tokenizer, or this model's if it has none."""
        kind = self._quantization
        loaded = load(
            folder,
            dtype=None if kind else self.dtype,
            device=self.device,
            decoder=self.loaded.wanted,
            quantization=kind,
        )
        if loaded.tokenizer is None:
            loaded.tokenizer = self.loaded.own_tokenizer()
        return loaded

    @property
    def kind(self) -> str | None:
        """Kind of exact products: "cublas" if it was requested, None for the backend's own."""
        return "cublas" if self._exact == "cublas" else None

    @property
    def exact_on(self) -> str | None:
        """Machines on which an exact engine's bits are the same; None if it is not exact."""
        if not self.exact:
            return None
        if self.device.type != "cpu":
            return "this kind of GPU"
        other = first_other(self.loaded.decoder, self.dtype, self.ops)
        return PORTABLE if other is None else "this kind of CPU"

    def receipt(self) -> Receipt:
        """The receipt of samples that are drawn from this model now."""
        module = self.loaded.current_module()
        key = model_key(module, self.decoder)
        if self._hash is None or self._hash[0] != key:
            self._hash = key, weights_hash(self.loaded.decoder)
        dtype = str(self.dtype).removeprefix("torch.")
        return receipt_of(self._hash[1], self.exact_on, dtype, str(self.device))

    def begin_call(self, requests: list[Request]) -> None:
        self._key = None
        if isinstance(self.loaded.decoder, ModuleDecoder | Decoder):
            self.loaded.decoder.begin_call()
        for request in requests:
            request.progress.stats.name_decoder(self.decoder)

    def any_threads(self) -> bool:
        """True if an exact engine keeps its bits with another number of threads."""
        threads = torch.get_num_threads()
        if not self.exact or threads == 1:
            return True
        if threads not in self._threads_agree:
            self._threads_agree[threads] = any_threads(self.decoder, self._products, threads)
        return self._threads_agree[threads]

    @property
    def key(self) -> ModelKey:
        """`csd.engine.resources.weights.model_key` of the model with which this run began."""
        if self._key is None:
            self._key = model_key(self.loaded.current_module(), self.decoder)
        return self._key

    @property
    def changed(self) -> bool:
        """True if the model's state differs from that of `key`, or a run that begins has none yet.

        Called in any thread: only the run's own makes its key.
        """
        key = self._key
        return key is None or key.state != model_state(self.loaded.current_module(), self.decoder)
