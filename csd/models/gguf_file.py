"""GGUF files: where one lies, and transformers' reading of it with less repetition."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

_one_at_a_time = Lock()


def folder_and_file(name: str) -> tuple[str, str]:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no file {name}")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("GGUF files need two more packages: pip install csd[gguf]") from error
    return str(path.parent), path.name


def plain_weights() -> dict[str, Any]:
    """The option that makes transformers dequantise a GGUF file; older ones always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, a file's header is parsed once, and a family's map of names is made once.

    transformers does the one for the config, the weights and the tokenizer, and the other for each
    module of the model. It takes both from the package `gguf` when it needs them.
    """
    import gguf

    names = "GGUFReader", "get_tensor_name_map"
    with _one_at_a_time:
        own = [getattr(gguf, name) for name in names]
        try:
            for name, function in zip(names, own, strict=True):
                setattr(gguf, name, cache(function))
            yield
        finally:
            for name, function in zip(names, own, strict=True):
                setattr(gguf, name, function)
