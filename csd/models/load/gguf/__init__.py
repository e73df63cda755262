"""The `transformers` model of a GGUF file, whose header is parsed once per load."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from csd.models.fused.config import ModelConfig
from csd.models.load.gguf.keys import config_fields, frequency_divisor
from csd.models.load.gguf.tensors import frequency_factors, weights
from csd.models.load.gguf.tokenizer import generation_config

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


_one_at_a_time = Lock()


def folder_and_file(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"the file {name} does not exist")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "GGUF files need two additional packages: pip install 'csd-llm[gguf]'"
        ) from error
    return str(path.parent), path.name


@contextmanager
def read_once() -> Iterator[None]:
    """Context in which a file's header is parsed once.

    The loaders of the model and of transformers' tokenizer both call `gguf.GGUFReader`, which is
    cached meanwhile.
    """
    import gguf

    with _one_at_a_time:
        own = gguf.GGUFReader
        setattr(gguf, READER, cache(own))
        try:
            yield
        finally:
            setattr(gguf, READER, own)
