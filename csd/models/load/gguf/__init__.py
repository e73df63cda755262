"""The `transformers` model of a GGUF file, from its header and its tensors."""

import logging
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from csd.kernels.layers.quantized import Quantized, QuantizedStack
from csd.kernels.layers.quantized.formats import FORMATS
from csd.models.fused.config import ModelConfig
from csd.models.fused.decoder import Decoder
from csd.models.fused.fuse import fuse, of_tensors
from csd.models.fused.rope import default_frequencies
from csd.models.load.gguf.architectures import ARCHITECTURES, Architecture, Shape
from csd.models.load.gguf.header import ByteTexts, Header, Tensor, header_of
from csd.models.load.gguf.keys import config_fields, frequency_divisor
from csd.models.load.gguf.tokenizer import BESIDE, generation_config, with_beside
from csd.utils.device import as_size
from csd.utils.lazy import pip_install

LOG = logging.getLogger("csd")
Place = tuple[str, Shape]
State = dict[str, torch.Tensor]
# names of the tensors with LongRoPE's factors
FACTORS = "rope_factors_"
LONGROPE = (f"{FACTORS}short.weight", f"{FACTORS}long.weight")


def weights(
    tensors: list[Tensor], config: Any, kind: Architecture, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """State dict without the factors of rotary frequencies.

    kind: how files of the architecture name and store the weights of `config`'s model. dtype: of
    all tensors, dequantised; None: matrices of a type that csd multiplies stay as in the file
    (`Quantized`), all else is float32, and a warning names the types of matrices that take more
    memory so. Raises ValueError, naming tensors, for one that is missing, left over, of another
    shape or of a type that cannot be dequantised.
    """
    places = dict(_places(config, kind, tied=all(t.name != "output.weight" for t in tensors)))
    _check(tensors, places, config)
    kept = set() if dtype is not None else _kept(tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    parts: dict[str, list[torch.Tensor]] = {}
    for name, (place, _) in places.items():
        tensor = by_name[name]
        if name in kept:
            rows = _quantized(tensor, config, kind)
        else:
            rows = torch.from_numpy(_rows(tensor, config, kind)).to(dtype or torch.float32)
        parts.setdefault(place, []).append(rows)
    return {name: _whole(rows) for name, rows in parts.items()}


# parts of one product of a decoder, which are all kept or all unpacked
_PRODUCTS = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps")


def _kept(tensors: list[Tensor]) -> set[str]:
    """Names of the matrices that stay as in the file; warns of others that take more memory."""
    matrices = {t.name: t for t in tensors if len(t.shape) > 1}
    unpacked = {name for name, t in matrices.items() if not is_multiplied(t)}
    for name in [*unpacked]:
        *layer, part, end = name.split(".")
        unpacked |= {".".join((*layer, p, end)) for ps in _PRODUCTS if part in ps for p in ps}
    larger = [t for n, t in matrices.items() if n in unpacked and t.bytes < 4 * prod(t.shape)]
    if larger:
        kinds = Counter(t.kind.name for t in larger)
        LOG.warning(
            "matrices of the GGUF file whose types csd does not multiply, and those multiplied "
            "together with them, are unpacked to float32: %s; this takes %s more memory",
            ", ".join(f"{count} of type {kind}" for kind, count in kinds.items()),
            as_size(sum(4 * prod(t.shape) - t.bytes for t in larger)),
        )
    return matrices.keys() - unpacked


def _whole(rows: list[torch.Tensor]) -> torch.Tensor:
    """One matrix of the experts' gates and of their other halves."""
    if len(rows) == 1:
        return rows[0]
    if isinstance(rows[0], QuantizedStack):
        return QuantizedStack([Quantized.cat(pair) for pair in zip(*rows, strict=True)])
    return torch.cat(rows, 1)


def is_multiplied(tensor: Tensor) -> bool:
    """True if csd multiplies a tensor of a file as it is there."""
    format = FORMATS.get(tensor.kind.name)
    return format is not None and len(tensor.shape) > 1 and format.serves(tensor.shape[-1])


def _quantized(tensor: Tensor, config: Any, kind: Architecture) -> torch.Tensor:
    format = FORMATS[tensor.kind.name]
    if _is_paired(tensor, kind):
        return Quantized.of_file(_in_halves(tensor.read(), config), format)
    matrices = [Quantized.of_file(rows, format) for rows in tensor.matrices()]
    return QuantizedStack(matrices) if len(tensor.shape) > 2 else matrices[0]


def frequency_factors(tensors: list[Tensor]) -> torch.Tensor | None:
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


def _check(tensors: list[Tensor], places: dict[str, Place], config: Any) -> None:
    want = {name: shape for name, (_, shape) in places.items()}
    if config.model_type == "llama" and any(t.name == "rope_freqs.weight" for t in tensors):
        want["rope_freqs.weight"] = (config.head_dim // 2,)
    for name in ("short", "long") if config.rope_parameters.get("short_factor") else ():
        # transformers has compared their lengths with the part of a head that is rotated
        want[FACTORS + f"{name}.weight"] = (len(config.rope_parameters[f"{name}_factor"]),)
    have = {t.name: t.shape for t in tensors}
    model = f"a {config.model_type} model of {config.num_hidden_layers} layers"
    if missing := sorted(want.keys() - have.keys()):
        raise ValueError(f"it lacks the tensors {_some(missing)} of {model}")
    if beyond := sorted(have.keys() - want.keys()):
        raise ValueError(f"it has tensors that {model} does not use: {_some(beyond)}")
    for name, shape in want.items():
        if have[name] != shape:
            text = f"its {name} must have shape {shape} according to its keys"
            raise ValueError(f"{text}, got {have[name]}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rows(tensor: Tensor, config: Any, kind: Architecture) -> np.ndarray:
    rows = _dequantised(tensor)
    if kind.shift and tensor.name.endswith("norm.weight"):
        return rows - np.float32(kind.shift)
    return _in_halves(rows, config) if _is_paired(tensor, kind) else rows


def _is_paired(tensor: Tensor, kind: Architecture) -> bool:
    """True if rotary embedding pairs neighbouring rows in the file, and halves in the module."""
    return kind.paired and tensor.name.endswith(("attn_q.weight", "attn_k.weight"))


def _in_halves(rows: np.ndarray, config: Any) -> np.ndarray:
    """Rows of queries or keys, pairs in the file, in the order of the module's halves of a head."""
    pairs = rows.reshape(-1, config.head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantised(tensor: Tensor) -> np.ndarray:
    from gguf import dequantize

    try:
        return dequantize(tensor.read(), tensor.kind)
    except NotImplementedError as error:
        kind = tensor.kind.name
        raise ValueError(f"its {tensor.name} is of type {kind}, which is not supported") from error


# long arrays of the tokenizer, which the model does not need
_LONG = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


class Read(NamedTuple):
    """A decoder that `read` makes of a file, and the generation config."""

    decoder: Decoder
    generation_config: Any


def read(path: str, dtype: torch.dtype | None, as_module: bool = True) -> Any:
    """The module in `dtype`; it and its generation config contain all keys and tensors.

    dtype: None keeps the file's numbers (`weights`) and computes in float32. as_module: if False,
    and dtype is None, `Read` is returned, without a module if csd has the rotary embedding's
    frequencies. Raises ValueError for a key or a tensor that csd does not compute with.
    """
    header, keys, config = _header(path)
    sizes = ModelConfig.from_transformers(config)
    state = weights(header.tensors, config, ARCHITECTURES[keys["general.architecture"]], dtype)
    factors, divisor = frequency_factors(header.tensors), frequency_divisor(keys)
    own = generation_config(keys, header.keys.get("tokenizer.ggml.tokens"))
    own = with_beside(own, Path(path).with_name(BESIDE))
    ropes = {sizes.rope.kind} | ({sizes.local_rope.kind} if sizes.local_rope else set())
    if not as_module and dtype is None and ropes == {"default"}:
        w = None
        if factors is not None or divisor != 1:
            w = default_frequencies(sizes.rope, sizes.rotary_dim or sizes.head_dim)
            w = _divided(w, divisor, factors)
        return Read(of_tensors(sizes, state, w), own)
    model = _module(config, state, dtype)
    if factors is not None or divisor != 1:
        _divided(model.model.rotary_emb.inv_freq, divisor, factors)
    # where an adapter's config, and a tokenizer, find the base
    model.name_or_path = model.config.name_or_path = path
    model.generation_config = own
    return model if as_module else Read(fuse(model), own)


def _divided(w: torch.Tensor, divisor: float, factors: torch.Tensor | None) -> torch.Tensor:
    w /= divisor
    if factors is not None:
        w /= factors.to(w.dtype)
    return w


def _module(config: Any, state: State, dtype: torch.dtype | None) -> Any:
    """A module of these tensors in `dtype`; None: of the tensors themselves, without gradients."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if dtype is not None:
        return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
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


def family_of(path: str) -> str | None:
    """Model type of the file's config; None for an architecture that csd does not read."""
    name = str(header_of(path).keys.get("general.architecture"))
    return ARCHITECTURES[name].families[0] if name in ARCHITECTURES else None


def has_quantized(path: str) -> bool:
    """True if csd multiplies matrices of the file as they are."""
    return any(map(is_multiplied, header_of(path).tensors))


def _header(path: str) -> tuple[Header, dict[str, Any], Any]:
    """The file's header, its short keys and the `transformers` config that they define."""
    from transformers import AutoConfig

    header = header_of(path)
    keys = {name: None if name in _LONG else _plain(v) for name, v in header.keys.items()}
    shapes = {t.name: t.shape for t in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError("it lacks the tensor token_embd.weight")
    factors = {
        t.name.removeprefix(FACTORS).removesuffix(".weight"): _dequantised(t).ravel().tolist()
        for t in header.tensors
        if keys.get("general.architecture") == "phi3" and t.name in LONGROPE
    }
    if len(factors) == 1:
        raise ValueError(f"it has one of the tensors {' and '.join(LONGROPE)}, and not the other")
    config = AutoConfig.for_model(
        **config_fields(keys, shapes["token_embd.weight"][0], factors),
        tie_word_embeddings="output.weight" not in shapes,
    )
    return header, keys, config


def _plain(value: Any) -> Any:
    return [text.decode() for text in value] if isinstance(value, ByteTexts) else value


def folder_and_file(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"the file {name} does not exist")
    if not (find_spec("accelerate") and find_spec("gguf")):
        raise ImportError(f"GGUF files need two additional packages: {pip_install('gguf')}")
    return str(path.parent), path.name
