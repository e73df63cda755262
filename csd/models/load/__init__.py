"""Loading of a decoder, its tokenizer and its generation config from a user's `model`."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from csd.kernels.layers.quantized import has_loop
from csd.models.demo import DEMO, smollm2_path
from csd.models.fused.config import ModelConfig, ModelSizes
from csd.models.fused.decoder import Decoder, DecoderLike
from csd.models.fused.fusable import DTYPES, checked_config
from csd.models.fused.fuse import is_fused, pack
from csd.models.fused.linear import multiplies_bfloat16
from csd.models.load import gguf as gguf_model
from csd.models.load.adapter import adapter_of, with_adapter
from csd.models.load.checkpoint import (
    check_folder,
    check_gguf,
    quiet_libraries,
    read_config,
    read_model,
    read_tokenizer,
    reading_gguf,
)
from csd.models.load.choose_decoder import DECODERS, decoder_of, rules_out_fused
from csd.models.load.quantize import check_quantization, quantize
from csd.models.module.decoder import ModuleDecoder
from csd.models.module.sizes import current_sizes
from csd.models.text_model import unwrapped
from csd.utils.arguments import check_one_of
from csd.utils.collector import paused
from csd.utils.device import BUSY, warn_of_unseen_gpu
from csd.utils.hub import hub_or_cache
from csd.utils.torch_state import plain_torch

BeforeWeights = Callable[[torch.device, torch.dtype, ModelSizes], None]


@dataclass
class Loaded:
    """A model ready to decode.

    `current_*` read the user's module, which may change between calls; `refresh` brings the decoder
    up to date with it.
    """

    decoder: DecoderLike
    config: ModelSizes
    tokenizer: Any  # None if none was given, or a folder has none
    generation_config: Any
    device: torch.device
    dtype: torch.dtype
    # the user's module, held weakly: csd must not keep a model alive
    module: weakref.ref | None = field(default=None, repr=False)
    wanted: str = "fused"  # a name in `csd.models.load.choose_decoder.DECODERS`
    # strong reference to a module that decodes, unless its user must keep it
    held: Any = field(default=None, repr=False)
    _looked_for_tokenizer: bool = field(default=False, repr=False)

    def refresh(self) -> bool:
        """Make the decoder again if it no longer matches the module; True if it was made again.

        For a fused decoder, weights' addresses, sizes and rotary frequencies are compared; for a
        module, its parts, hooks and config. Weights changed in place need no refresh.
        """
        model = self.current_module()
        if model is None or self._is_current(model):
            return False
        self.decoder = decoder = decoder_of(model, self.wanted)
        self.config = decoder.config
        self.device, self.dtype = _device_and_dtype(decoder)
        return True

    def _is_current(self, model: Any) -> bool:
        if isinstance(self.decoder, ModuleDecoder):
            plain = self.wanted == "auto" and rules_out_fused(model) is None
            return not plain and self.decoder.is_current()
        try:
            return isinstance(self.decoder, Decoder) and is_fused(model, self.decoder)
        except (AttributeError, TypeError, ValueError):
            if self.wanted != "auto":
                raise
            return False

    def current_config(self) -> ModelSizes:
        """The module's current sizes. Raises as `load` does if csd no longer runs it."""
        model = self.current_module()
        if model is None:
            return self.config
        try:
            if self.wanted != "module":
                return checked_config(model)
        except (AttributeError, TypeError, ValueError):
            if self.wanted != "auto":
                raise
        return current_sizes(model, self.decoder.config)

    def current_generation_config(self) -> Any:
        model = self.current_module()
        return self.generation_config if model is None else model.generation_config

    def own_tokenizer(self) -> Any:
        """The given tokenizer, else the one of the module's folder, read once; None without one."""
        model = self.current_module()
        if self.tokenizer is None and model is not None and not self._looked_for_tokenizer:
            self.tokenizer = _tokenizer_of(model)
            self._looked_for_tokenizer = True
        return self.tokenizer

    def current_module(self) -> Any:
        """The user's module; None if there is none, or it is gone."""
        return None if self.module is None else self.module()


@plain_torch()
def load(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
    before: BeforeWeights | None = None,
    decoder: str = "fused",
    packed: bool = True,
    quantization: str | None = None,
) -> Loaded:
    """Load a model for decoding.

    model: a transformers model, a local folder with a model or a peft adapter, a hub name, a GGUF
    file, "demo" (`csd.models.demo.smollm2_path`), a `Decoder`, or a `Loaded`, which is returned as
    it is.
    before: called with device, dtype and sizes before weights are read, if the config names these.
    decoder: "auto", "fused" or "module" (`csd.models.load.choose_decoder`). packed: whether
    matrices of a model that is loaded by name get the layout in which a CPU multiplies few rows.
    dtype: None takes the checkpoint's if the device multiplies bfloat16 in hardware; on such a CPU
    a GGUF file runs in bfloat16, and float16 becomes float32. Elsewhere None is float32.
    quantization: a name in `csd.models.load.quantize.TYPES`, to which matrices of a model that is
    loaded by name are rounded; it then computes in float32.
    """
    check_one_of("decoder", decoder, DECODERS)
    model = unwrapped(model)
    if isinstance(model, Loaded):
        return model
    if isinstance(model, str | os.PathLike):
        name = _file_of_demo(os.fspath(model))
        with paused(), hub_or_cache(name):
            return _from_path(
                name, dtype, device, revision, tokenizer, before, decoder, packed, quantization
            )
    if not isinstance(model, nn.Module | Decoder):
        raise TypeError(
            "model must be a transformers model, a local folder, a hub name, a GGUF file or a "
            f"csd.Engine, got {type(model).__name__}"
        )
    remedy = ": save it with save_pretrained, and pass the folder's path"
    of_files = dict(dtype=dtype, device=device, revision=revision, quantization=quantization)
    for name, value in of_files.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None for a model that is already loaded, got {value!r}"
                f"{remedy if name == 'quantization' else ''}"
            )
    if isinstance(model, Decoder):
        return _loaded(model, tokenizer)
    made = decoder_of(model, decoder)
    held = model if isinstance(made, ModuleDecoder) else None
    own = dict(module=weakref.ref(model), wanted=decoder, held=held)
    return _loaded(made, tokenizer, model.generation_config, **own)


def _loaded(
    decoder: DecoderLike, tokenizer: Any, generation_config: Any = None, **own: Any
) -> Loaded:
    read = decoder.config, tokenizer, generation_config
    return Loaded(decoder, *read, *_device_and_dtype(decoder), **own)


def _device_and_dtype(decoder: DecoderLike) -> tuple[torch.device, torch.dtype]:
    if isinstance(decoder, ModuleDecoder):
        return decoder.device, decoder.dtype
    assert isinstance(decoder, Decoder)
    return decoder.embedding.device, decoder.embedding.dtype


def _tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer from the model's folder, or from the hub's files on this machine."""
    path = getattr(model.config, "_name_or_path", None)
    if path and path.endswith(".gguf") and os.path.isfile(path):
        return read_tokenizer(*_path_and_options(path, None))
    return read_tokenizer(path, {"local_files_only": True}) if path else None


def _from_path(
    name: str,
    dtype: torch.dtype | str | None,
    device: str | torch.device | None,
    revision: str | None,
    tokenizer: Any,
    before: BeforeWeights | None,
    wanted: str,
    packed: bool,
    quantization: str | None,
) -> Loaded:
    if device is None:
        warn_of_unseen_gpu()
    device = usable(device)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    adapter = adapter_of(name, revision)
    base, revision = (name, revision) if adapter is None else (adapter.base, adapter.base_revision)
    path, options = _path_and_options(base, revision)
    as_stored = dtype is None and device.type == "cpu" and has_loop()
    as_stored = as_stored and (adapter is None or adapter.leaves_base)
    if quantization is not None:
        check_quantization(quantization, base, dtype, device, wanted)
        # rounded from the checkpoint's own numbers, by csd's decoder or not at all
        dtype, wanted = "auto", "fused"
    if dtype is None:
        dtype = _default_dtype(device, base.endswith(".gguf"))
    with quiet_libraries(), hub_or_cache(base):
        on_config = None if before is None else partial(before, device)
        if tokenizer is None and adapter is not None:
            tokenizer = adapter.tokenizer
        if "gguf_file" in options:
            file = os.path.join(path, options["gguf_file"])
            made_in = check_gguf(base, file, dtype, on_config, as_stored)
            if tokenizer is None and adapter is None:
                # before the weights, beside which the vocabulary's texts would take memory
                tokenizer = read_tokenizer(path, options)
            as_module = adapter is not None or wanted == "module"
            with reading_gguf(base):
                model = gguf_model.read(file, made_in, as_module)
        else:
            model = read_model(base, path, dtype, options, on_config, wanted)
            if quantization is not None:
                quantize(model, quantization)
        if adapter is not None:
            model = with_adapter(model, adapter, tokenizer)
        if tokenizer is None:
            tokenizer = read_tokenizer(path, options)
    if isinstance(model, gguf_model.Read):
        pack(model.decoder)
        return _loaded(model.decoder, tokenizer, model.generation_config)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        # few CPUs multiply float16, and float32 represents its numbers
        model = model.float()
    if next(model.parameters()).device != device:
        model = model.to(device)
    decoder, generation_config = decoder_of(model, wanted), model.generation_config
    if adapter is not None or not isinstance(decoder, Decoder):
        module = dict(module=weakref.ref(model), wanted=wanted, held=model)
        return _loaded(decoder, tokenizer, generation_config, **module)
    # without the model, each plain matrix is freed when its packed one is made
    del model
    if packed:
        pack(decoder)
    return _loaded(decoder, tokenizer, generation_config)


def gguf_module(
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Any:
    """The `transformers` model of a GGUF file, for `csd.logprobs`, peft and trainers.

    dtype: of its weights, which are unpacked and trained in it. None keeps the file's quantised
    matrices where csd multiplies them: they have no gradient, and adapters beside them are trained.
    device: as in `csd.Engine`.

    Raises ValueError for a path that is no GGUF file's, and as `load` does.
    """
    name, on = os.fspath(path), usable(device)
    if not name.endswith(".gguf"):
        raise ValueError(f"path must be a GGUF file's (*.gguf), got {name!r}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    as_stored = dtype is None and on.type == "cpu" and has_loop()
    folder, options = _path_and_options(name, None)
    # as an adapter's config will name it
    file = os.path.normpath(os.path.join(folder, options["gguf_file"]))
    with quiet_libraries():
        wanted = _default_dtype(on, is_gguf=True) if dtype is None else dtype
        made_in = check_gguf(name, file, wanted, None, as_stored)
        with reading_gguf(name):
            model = gguf_model.read(file, made_in, as_module=True)
    return model.to(on)


def config_of(name: str) -> ModelConfig:
    """Sizes of a model by its name, path or GGUF file; its weights are not read."""
    name = _file_of_demo(name)
    with hub_or_cache(name):
        adapter = adapter_of(name)
        name = name if adapter is None else adapter.base
        path, options = _path_and_options(name, None if adapter is None else adapter.base_revision)
        if "gguf_file" in options:
            with reading_gguf(name):
                return gguf_model.read_config(os.path.join(path, options["gguf_file"]))
        with hub_or_cache(name):
            config = read_config(name, path, options)[1]
    assert config is not None
    return config


def tokenizer_of(name: str, revision: str | None = None) -> Any:
    """Tokenizer of a model by its name; None if it has none. The weights are not read."""
    name = _file_of_demo(name)
    with hub_or_cache(name):
        adapter = adapter_of(name, revision)
        if adapter is None:
            return read_tokenizer(*_path_and_options(name, revision))
        of_base = adapter.base, adapter.base_revision
        with hub_or_cache(adapter.base):
            return adapter.tokenizer or read_tokenizer(*_path_and_options(*of_base))


def _file_of_demo(name: str) -> str:
    """GGUF file of the demo's model for its name; any other name, or a folder of it, as it is.

    Raises ValueError for a path of nothing, which the hub would be asked for.
    """
    if name == DEMO and not os.path.exists(name):
        return smollm2_path()
    if not os.path.lexists(name) and not name.endswith(".gguf"):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ValueError(
                f"{name!r}: no such folder or file, and no name of the hub, such as Qwen/Qwen3-0.6B"
            ) from error
    return name


def _path_and_options(name: str, revision: str | None) -> tuple[str, dict[str, str]]:
    """Folder or hub name of a model for transformers, and the options to load it with."""
    if name.endswith(".gguf"):
        folder, file = gguf_model.folder_and_file(name)
        path, options = folder, {"gguf_file": file}
    elif os.path.isdir(name):
        check_folder(name)
        path, options = name, {}
    # a link that leads nowhere is no name of the hub either
    elif os.path.lexists(name):
        raise ValueError(f"{name} is a file, but not a GGUF file or a model's folder")
    else:
        return name, {"revision": revision or "main"}
    if revision is not None:
        raise ValueError(f"revision must be None for a local path, got {name}")
    return path, options


def _default_dtype(device: torch.device, is_gguf: bool) -> torch.dtype | str:
    if device.type == "cuda":
        return "auto"
    if device.type != "cpu" or not multiplies_bfloat16():
        return torch.float32
    return torch.bfloat16 if is_gguf else "auto"


def usable(device: str | torch.device | None) -> torch.device:
    """The device of that name; None: a GPU if there is one. Raises ValueError if unusable."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        known = torch.device(device)
        torch.empty(1, device=known).item()
    # torch passes on the exceptions of its back ends
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        # without this backend, torch's message is a line and then its whole table of kernels
        reason = str(error).partition("\n")[0]
        if BUSY in reason:
            reason += (
                "; in compute-exclusive mode only one process can use the GPU: end the other one, "
                "or run `nvidia-smi --compute-mode=DEFAULT`"
            )
        raise ValueError(f"device {device!r} cannot be used here: {reason}") from error
    return known
