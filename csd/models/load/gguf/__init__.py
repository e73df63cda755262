"""The `transformers` model of a GGUF file, whose header is parsed once per load."""

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


_one_at_a_time = RLock()


def folder_and_file(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"the file {name} does not exist")
    if not (find_spec("accelerate") and find_spec("gguf")):
        raise ImportError("GGUF files need two additional packages: pip install 'csd-llm[gguf]'")
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
