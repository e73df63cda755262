"""numba's on-disk cache of compiled loops; a file that cannot be read or written ends no call.

A file may be incomplete, for example after a crash or on a full disk, and its content is unpickled
and run. So each file begins with a digest, and links, and files that other users own or can write,
which may lie in a folder that all can write to, are not read.
"""

import hashlib
import logging
import os
import pickle
import uuid
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

from csd.utils.files import open_own

# part of the names of the files that this process writes
PROCESS = uuid.uuid4().hex[:12]


class Once:
    """Logs a warning the first time that it is called, and nothing afterwards."""

    def __init__(self, text: str):
        self.text, self.done = text, False

    def __call__(self, *args: object) -> None:
        if not self.done:
            self.done = True
            logging.getLogger("csd").warning(self.text, *args)


UNREAD = Once("a compiled kernel could not be loaded and is compiled again: %s")
UNKEPT = Once("csd cannot cache its compiled kernels, so each process compiles them again: %s")


class Kept(FunctionCache):
    """numba's on-disk cache of one function, whose errors are logged and ignored.

    stamp: digest of all sources that the function depends on; None for numba's own stamp.
    """

    def __init__(self, function: Any, stamp: str | None):
        super().__init__(function)
        names = self._cache_path, self._impl.filename_base
        owner = os.stat(function.__code__.co_filename).st_uid if stamp else None
        self._cache_file = Files(*names, stamp or self._cache_file._source_stamp, owner)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        # numba, LLVM and the linker raise exceptions of any class when they load code
        except Exception as error:
            UNREAD(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            UNKEPT(error)


class Files(IndexDataCacheFile):
    """The index of a function's compiled overloads, and a file for each, numbered by numba."""

    def __init__(self, folder: str, name: str, stamp: Any, owner: int | None):
        super().__init__(folder, f"{name}.digest", stamp)
        # numba numbers files by an index that it has read earlier: of two processes that compile
        # for different dtypes at once, one would replace the other's code under the same number
        self._data_name_pattern = f"{name}.{PROCESS}.{{number:d}}.nbc"
        self._owners = {owner}

    def _load_index(self) -> dict:
        data = self._read(self._index_path)
        if data is None:
            return {}
        # a pickle of another numba version or of other sources may name classes that do not exist,
        # so that of the overloads is read last
        *key, overloads = pickle.loads(data)
        return pickle.loads(overloads) if key == [self._version, self._source_stamp] else {}

    def _save_index(self, overloads: dict) -> None:
        parts = self._version, self._source_stamp, self._dump(overloads)
        self._write(self._index_path, pickle.dumps(parts))

    def _load_data(self, name: str) -> Any:
        data = self._read(self._data_path(name))
        return None if data is None else pickle.loads(data)

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), self._dump(data))

    def _read(self, path: str) -> bytes | None:
        """A file's data without the digest; None if the file does not exist or may not be used."""
        try:
            with open(open_own(path, os.O_RDONLY, owners=self._owners), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            UNREAD(error)
            return None
        if _digest(path, data[32:]) == data[:32]:
            return data[32:]
        UNREAD(f"{path} is damaged")
        return None

    def _write(self, path: str, data: bytes) -> None:
        with self._open_for_write(path) as file:
            # whatever the umask, because a file that others can write is not read
            os.fchmod(file.fileno(), 0o644)
            file.write(_digest(path, data) + data)


def _digest(path: str, data: bytes) -> bytes:
    # includes the name, so that one loop's file in place of another's is detected
    return hashlib.sha256(os.path.basename(path).encode() + data).digest()
