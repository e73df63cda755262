"""GGUF files: folder and name of one, and a cache of its parsed header while it is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock

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
