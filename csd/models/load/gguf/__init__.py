"""The `transformers` model of a GGUF file: its header, parsed once per load, and its tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import nn

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.kernels.layers.quantized.formats import FORMATS
from csd.models.fused.config import ModelConfig
from csd.models.load.gguf.architectures import ARCHITECTURES, Architecture, Shape
from csd.models.load.gguf.keys import config_fields, frequency_divisor
from csd.models.load.gguf.tokenizer import BESIDE, generation_config, with_beside
from csd.utils.lazy import pip_install

Place = tuple[str, Shape]
State = dict[str, torch.Tensor]
# names of the tensors with LongRoPE's factors
FACTORS = "rope_factors_"
LONGROPE = (f"{FACTORS}short.weight", f"{FACTORS}long.weight")


def weights(
    tensors: Any, config: Any, kind: Architecture, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """State dict without the factors of rotary frequencies.

    kind: how files of the architecture name and store the weights of `config`'s model. dtype: of
    all tensors, dequantised; None: matrices of a type that csd multiplies stay as in the file
    (`Quantized`), all else is float32. Raises ValueError, naming tensors, for one that is missing,
    left over, of another shape or of a type that cannot be dequantised.
    """
    places = dict(_places(config, kind, tied=all(t.name != "output.weight" for t in tensors)))
    _check(tensors, places, config)
    by_name = {tensor.name: tensor for tensor in tensors}
    parts: dict[str, list[torch.Tensor]] = {}
    for name, (place, _) in places.items():
        tensor = by_name[name]
        if dtype is None and is_multiplied(tensor):
            rows = _quantized(tensor, config, kind)
        else:
            rows = torch.from_numpy(_rows(tensor, config, kind)).to(dtype or torch.float32)
        parts.setdefault(place, []).append(rows)
    return {name: _whole(rows) for name, rows in parts.items()}


def _whole(rows: list[torch.Tensor]) -> torch.Tensor:
    """One matrix of the experts' gates and of their other halves."""
    if len(rows) == 1:
        return rows[0]
    if all(isinstance(part, QuantizedStack) for part in rows):
        return QuantizedStack([Quantized.cat(pair) for pair in zip(*rows, strict=True)])
    return torch.cat([p.dequantize() if isinstance(p, QuantizedStack) else p for p in rows], 1)


def is_multiplied(tensor: Any) -> bool:
    """True if csd multiplies a tensor of a file as it is there."""
    format = FORMATS.get(tensor.tensor_type.name)
    return format is not None and len(tensor.shape) > 1 and format.serves(int(tensor.shape[0]))


def _quantized(tensor: Any, config: Any, kind: Architecture) -> torch.Tensor:
    format, rows = FORMATS[tensor.tensor_type.name], _in_halves(tensor.data, tensor, config, kind)
    if rows.ndim == 2:
        return Quantized.of_file(rows, format)
    return QuantizedStack([Quantized.of_file(of_one, format) for of_one in rows])


def frequency_factors(tensors: Any) -> torch.Tensor | None:
    """Divisors [D / 2] of the rotary frequencies, in Llama 3.1 and later; None if absent."""
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            factors = torch.from_numpy(_dequantised(tensor)).float()
            if not (factors.isfinite() & (factors > 0)).all():
                raise ValueError("its rope_freqs.weight must be positive")
            return factors
    return None


def _places(config: Any, kind: Architecture, tied: bool) -> Iterator[tuple[str, Place]]:
    """Yield each weight's name in the file, name in the module and shape."""
    c, hidden = config, config.hidden_size
    yield "token_embd.weight", ("model.embed_tokens.weight", (c.vocab_size, hidden))
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not tied:
        yield "output.weight", ("lm_head.weight", (c.vocab_size, hidden))
    for i in range(c.num_hidden_layers):
        for name, (name_of, shape) in kind.tensors(c).items():
            yield f"blk.{i}.{name}", (f"model.layers.{i}.{name_of}", shape)


def _check(tensors: Any, places: dict[str, Place], config: Any) -> None:
    want = {name: shape for name, (_, shape) in places.items()}
    if config.model_type == "llama" and any(t.name == "rope_freqs.weight" for t in tensors):
        want["rope_freqs.weight"] = (config.head_dim // 2,)
    for name in ("short", "long") if config.rope_parameters.get("short_factor") else ():
        # transformers has compared their lengths with the part of a head that is rotated
        want[FACTORS + f"{name}.weight"] = (len(config.rope_parameters[f"{name}_factor"]),)
    # GGUF lists the innermost dimension first
    have = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    model = f"a {config.model_type} model of {config.num_hidden_layers} layers"
    if missing := sorted(want.keys() - have.keys()):
        raise ValueError(f"it lacks the tensors {_some(missing)} of {model}")
    if beyond := sorted(have.keys() - want.keys()):
        text = f"it has tensors that {model} does not use"
        raise ValueError(f"{text}: {_some(beyond)}")
    for name, shape in want.items():
        if have[name] != shape:
            raise ValueError(
                f"its {name} must have shape {shape} according to its keys, got {have[name]}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rows(tensor: Any, config: Any, kind: Architecture) -> np.ndarray:
    rows = _dequantised(tensor)
    if kind.shift and tensor.name.endswith("norm.weight"):
        return rows - np.float32(kind.shift)
    return _in_halves(rows, tensor, config, kind)


def _in_halves(rows: np.ndarray, tensor: Any, config: Any, kind: Architecture) -> np.ndarray:
    """Rows of queries and keys in the module's order; other rows as they are."""
    if not kind.paired or not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return rows
    # rotary embedding pairs neighbouring rows in the file, and two halves of a head in the module
    pairs = rows.reshape(-1, config.head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantised(tensor: Any) -> np.ndarray:
    from gguf import dequantize

    try:
        # a copy in memory, since the file's own numbers are mapped read-only
        return np.array(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"its {tensor.name} is of type {kind}, which is not supported") from error


# long arrays of the tokenizer, which the model does not need
_LONG = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


def read(path: str, dtype: torch.dtype | None) -> Any:
    """The model in `dtype`; it and its generation config contain all keys and tensors.

    dtype: None keeps the file's numbers (`weights`) and computes in float32. Raises ValueError for a key or a tensor that csd does not compute with.
    """
    from transformers import AutoModelForCausalLM

    reader, keys, config = _header(path)
    ModelConfig.from_transformers(config)
    differs = ARCHITECTURES[keys["general.architecture"]]
    state = weights(reader.tensors, config, differs, dtype)
    factors, divisor = frequency_factors(reader.tensors), frequency_divisor(keys)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if dtype is None:
        model = _made_of(kind, config, state)
    else:
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    if factors is not None or divisor != 1:
        w = model.model.rotary_emb.inv_freq
        w /= divisor
        if factors is not None:
            w /= factors.to(w.dtype)
    own = generation_config(keys, reader.fields.get("tokenizer.ggml.tokens"))
    model.generation_config = with_beside(own, Path(path).with_name(BESIDE))
    # where an adapter's config, and a tokenizer, find the base
    model.name_or_path = model.config.name_or_path = path
    return model


def _made_of(kind: Any, config: Any, state: State) -> Any:
    """A model without gradients whose parameters are the tensors of `state`, not copies."""
    from accelerate import init_empty_weights

    if any(isinstance(tensor, QuantizedStack) for tensor in state.values()):
        # expert by expert, since the module's other ways take the whole stack
        config._experts_implementation = "eager"
    with init_empty_weights(include_buffers=False):
        model = kind(config)
    for name, tensor in state.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, nn.Parameter(tensor, requires_grad=False))
    if "lm_head.weight" not in state:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval()


def read_config(path: str) -> ModelConfig:
    """The sizes of the model. Raises ValueError for keys, as `read` does."""
    return ModelConfig.from_transformers(_header(path)[2])


def has_quantized(path: str) -> bool:
    """True if csd multiplies matrices of the file as they are."""
    import gguf

    return any(map(is_multiplied, gguf.GGUFReader(path).tensors))


def _header(path: str) -> tuple[Any, dict[str, Any], Any]:
    """The file's reader, its keys and the `transformers` config that they define."""
    import gguf
    from transformers import AutoConfig

    reader = gguf.GGUFReader(path)
    keys = {n: None if n in _LONG else f.contents() for n, f in reader.fields.items()}
    shapes = {t.name: t.shape for t in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError("it lacks the tensor token_embd.weight")
    factors = {
        t.name.removeprefix(FACTORS).removesuffix(".weight"): _dequantised(t).ravel().tolist()
        for t in reader.tensors
        if keys.get("general.architecture") == "phi3" and t.name in LONGROPE
    }
    if len(factors) == 1:
        raise ValueError(f"it has one of the tensors {' and '.join(LONGROPE)}, and not the other")
    config = AutoConfig.for_model(
        **config_fields(keys, int(shapes["token_embd.weight"][-1]), factors),
        tie_word_embeddings="output.weight" not in shapes,
    )
    return reader, keys, config


READER = "GGUFReader"


_one_at_a_time = RLock()


def folder_and_file(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"the file {name} does not exist")
    if not (find_spec("accelerate") and find_spec("gguf")):
        raise ImportError(f"GGUF files need two additional packages: {pip_install('gguf')}")
    return str(path.parent), path.name


# entries of a list in a header: of the tokens or merges of a vocabulary
MAX_ENTRIES = 1 << 22


def checked(reader: type) -> type:
    """A `gguf.GGUFReader` that reads nothing behind the file's end, and no list without end.

    gguf's own takes any length in a header, and reads what is not there as nothing. It makes four
    arrays for each number and text of a vocabulary's lists; here each takes one.
    """
    from gguf import GGUFValueType

    class Reader(reader):
        def _get(
            self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None
        ) -> np.ndarray:
            count, kind = int(count), np.dtype(dtype)
            if offset + kind.itemsize * count > len(self.data):
                raise ValueError("the file ends within its header or its tensors")
            order = override_order or self.byte_order
            return np.ndarray((count,), kind.newbyteorder(order), self.data, offset)

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == GGUFValueType.ARRAY:
                entries = int(self._get(offset + 4, np.uint64)[0])
                if entries > MAX_ENTRIES:
                    raise ValueError(f"its header has a list of {entries} entries")
            return super()._get_field_parts(offset, kind)

    return Reader


@contextmanager
def read_once() -> Iterator[None]:
    """Context in which a file's header is parsed once.

    The loaders of the model and of transformers' tokenizer both call `gguf.GGUFReader`, which is
    cached and `checked` meanwhile.
    """
    import gguf

    with _one_at_a_time:
        own = gguf.GGUFReader
        if not isinstance(own, type):
            # within another such context
            yield
            return
        setattr(gguf, READER, cache(checked(own)))
        try:
            yield
        finally:
            setattr(gguf, READER, own)
