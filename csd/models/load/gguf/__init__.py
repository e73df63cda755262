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

from csd.models.fused.config import ModelConfig
from csd.models.load.gguf.keys import config_fields, frequency_divisor
from csd.models.load.gguf.tokenizer import generation_config
from csd.utils.lazy import pip_install

Shape = tuple[int, ...]


def weights(tensors: Any, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dequantised state dict in `dtype`, without `rope_freqs.weight` (`frequency_factors`).

    Raises ValueError, naming tensors, for one that is missing, left over, of another shape or of a
    type that cannot be dequantised.
    """
    places = dict(_places(config, tied=all(t.name != "output.weight" for t in tensors)))
    _check(tensors, places, config)
    state = {}
    for tensor in tensors:
        if tensor.name in places:
            rows = torch.from_numpy(_rows(tensor, config)).to(dtype)
            state[places[tensor.name][0]] = rows
    return state


def frequency_factors(tensors: Any) -> torch.Tensor | None:
    """Divisors [D / 2] of the rotary frequencies, in Llama 3.1 and later; None if absent."""
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            factors = torch.from_numpy(_dequantised(tensor)).float()
            if not (factors.isfinite() & (factors > 0)).all():
                raise ValueError("its rope_freqs.weight must be positive")
            return factors
    return None


def _places(config: Any, tied: bool) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Yield each weight's name in the file, name in the module and shape."""
    c, hidden, D = config, config.hidden_size, config.head_dim
    yield "token_embd.weight", ("model.embed_tokens.weight", (c.vocab_size, hidden))
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not tied:
        yield "output.weight", ("lm_head.weight", (c.vocab_size, hidden))
    q, kv = c.num_attention_heads * D, c.num_key_value_heads * D
    layer: dict[str, tuple[str, Shape]] = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (c.intermediate_size, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (c.intermediate_size, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, c.intermediate_size)),
    }
    if c.model_type == "qwen2":
        layer["attn_q.bias"] = ("self_attn.q_proj.bias", (q,))
        layer["attn_k.bias"] = ("self_attn.k_proj.bias", (kv,))
        layer["attn_v.bias"] = ("self_attn.v_proj.bias", (kv,))
    if c.model_type == "qwen3":
        layer["attn_q_norm.weight"] = ("self_attn.q_norm.weight", (D,))
        layer["attn_k_norm.weight"] = ("self_attn.k_norm.weight", (D,))
    for i in range(c.num_hidden_layers):
        for name, (name_of, shape) in layer.items():
            yield f"blk.{i}.{name}", (f"model.layers.{i}.{name_of}", shape)


def _check(tensors: Any, places: dict[str, tuple[str, Shape]], config: Any) -> None:
    want = {name: shape for name, (_, shape) in places.items()}
    if config.model_type == "llama" and any(t.name == "rope_freqs.weight" for t in tensors):
        want["rope_freqs.weight"] = (config.head_dim // 2,)
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


def _rows(tensor: Any, config: Any) -> np.ndarray:
    rows = _dequantised(tensor)
    if config.model_type != "llama" or not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
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


def read(path: str, dtype: torch.dtype) -> Any:
    """The model in `dtype`; it and its generation config contain all keys and tensors.

    Raises ValueError for a key or a tensor that csd does not compute with.
    """
    from transformers import AutoModelForCausalLM

    reader, keys, config = _header(path)
    ModelConfig.from_transformers(config)
    state, factors = weights(reader.tensors, config, dtype), frequency_factors(reader.tensors)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    w = model.model.rotary_emb.inv_freq
    w /= frequency_divisor(keys)
    if factors is not None:
        w /= factors.to(w.dtype)
    model.generation_config = generation_config(keys, reader.fields.get("tokenizer.ggml.tokens"))
    return model


def read_config(path: str) -> ModelConfig:
    """The sizes of the model. Raises ValueError for keys, as `read` does."""
    return ModelConfig.from_transformers(_header(path)[2])


def _header(path: str) -> tuple[Any, dict[str, Any], Any]:
    """The file's reader, its keys and the `transformers` config that they define."""
    import gguf
    from transformers import AutoConfig

    reader = gguf.GGUFReader(path)
    keys = {n: None if n in _LONG else f.contents() for n, f in reader.fields.items()}
    shapes = {t.name: t.shape for t in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError("it lacks the tensor token_embd.weight")
    config = AutoConfig.for_model(
        **config_fields(keys, vocab=int(shapes["token_embd.weight"][-1])),
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
