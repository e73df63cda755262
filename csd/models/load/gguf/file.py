"""GGUF files: folder and name of one, and a cache of its parsed header while it is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

READER = "GGUFReader"
_one_at_a_time = RLock()


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


# entries of a list in a header: of the tokens or merges of a vocabulary
MAX_ENTRIES = 1 << 22


def checked(reader: type) -> type:
    """A `gguf.GGUFReader` that reads nothing behind the file's end, and no list without end.

    gguf's own takes any length in a header, and reads what is not there as nothing.
    """
    from gguf import GGUFValueType

    class Reader(reader):
        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("the file ends within its header or its tensors")
            return super()._get(offset, dtype, count, **order)

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
    cached meanwhile, and `checked`.
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
