"""The files in which numba keeps compiled loops: one that cannot be read or written ends no call.

A file may be torn, as where a machine stopped or a disk was full, and what it holds is unpickled
and run. So each begins with a digest, and another user's, as in a folder that all can write to, is
not read.
"""

import hashlib
import logging
import os
import pickle
import uuid
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

# in the names of the files that this process writes
PROCESS = uuid.uuid4().hex[:12]


class Once:
    """Logs a warning the first time that it is called."""

    def __init__(self, text: str):
        self.text, self.done = text, False

    def __call__(self, *args: object) -> None:
        if not self.done:
            self.done = True
            logging.getLogger("csd").warning(self.text, *args)


UNREAD = Once("a loop that was compiled before is compiled anew: %s")
UNKEPT = Once("csd cannot keep the loops that it compiles, so each process compiles its own: %s")


class Kept(FunctionCache):
    """numba's cache of one function, without its errors. stamp: of all sources of its code."""

    def __init__(self, function: Any, stamp: str | None):
        super().__init__(function)
        names = self._cache_path, self._impl.filename_base
        owner = os.stat(function.__code__.co_filename).st_uid if stamp else None
        self._cache_file = Files(*names, stamp or self._cache_file._source_stamp, owner)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        # numba, LLVM and the linker raise what they raise where they take code up
        except Exception as error:
            UNREAD(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            UNKEPT(error)


class Files(IndexDataCacheFile):
    """The index of a function's compiled forms, and a file for each, as numba numbers them."""

    def __init__(self, folder: str, name: str, stamp: Any, owner: int | None):
        super().__init__(folder, f"{name}.digest", stamp)
        # numba numbers what it writes by an index that it has read before: of two processes that
        # compile for different dtypes at once, one would replace the other's code under one number
        self._data_name_pattern = f"{name}.{PROCESS}.{{number:d}}.nbc"
        self._owners = {0, os.geteuid(), owner}

    def _load_index(self) -> dict:
        data = self._read(self._index_path)
        if data is None:
            return {}
        # another version's objects may be unknown, and so may classes of other sources
        version, stamp, overloads = _parts(data)
        if version != self._version or stamp != self._source_stamp:
            return {}
        return pickle.loads(overloads)

    def _save_index(self, overloads: dict) -> None:
        parts = self._version, self._source_stamp, self._dump(overloads)
        self._write(self._index_path, pickle.dumps(parts))

    def _load_data(self, name: str) -> Any:
        data = self._read(self._data_path(name))
        return None if data is None else pickle.loads(data)

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), self._dump(data))

    def _read(self, path: str) -> bytes | None:
        """Data of a file; None where there is no such file or it may not be used."""
        try:
            with open(path, "rb") as file:
                owner, data = os.fstat(file.fileno()).st_uid, file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            UNREAD(error)
            return None
        if owner not in self._owners:
            UNREAD(f"{path} is of user {owner}")
        elif _digest(path, data[32:]) != data[:32]:
            UNREAD(f"{path} is not as it was written")
        else:
            return data[32:]
        return None

    def _write(self, path: str, data: bytes) -> None:
        with self._open_for_write(path) as file:
            file.write(_digest(path, data) + data)


def _parts(index: bytes) -> tuple[Any, Any, bytes]:
    """An index's version, stamp and overloads; None of each where it is of another layout."""
    found = pickle.loads(index)
    return found if len(found) == 3 else (None, None, b"")


def _digest(path: str, data: bytes) -> bytes:
    # with the name: one loop's file in place of another's is not as it was written
    return hashlib.sha256(os.path.basename(path).encode() + data).digest()
