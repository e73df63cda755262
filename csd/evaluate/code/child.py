"""Run one program and its test with limits; this file is the script of a process of its own.

It reads a JSON object from standard input, and writes the object's token to standard output after
the last line of the test. A program that ends the process earlier writes no token, whatever its
exit status. It imports nothing of csd, so that it starts fast.
"""

import ctypes
import json
import os
import sys
from types import CodeType
from typing import Any

# of <linux/landlock.h>: rights to change files, by the first version that has them
_WRITES = {1: 0x1FF2, 2: 1 << 13, 3: 1 << 14}
_EXECUTE = 1
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_NO_NEW_PRIVS = 38
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000

# events of sys.addaudithook that start processes, signal others, load C code or use a network
_REFUSED = (
    "ctypes.",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.system",
    "pty.",
    "socket.",
    "subprocess.",
)
# events that change a path, with the number of their first arguments that are paths
_CHANGES = {
    "os.chflags": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.removexattr": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.setxattr": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(seconds: int, memory: int, file: int) -> None:
    """Set limits of this process: CPU seconds, bytes of address space, bytes of a file."""
    import resource

    limits = {
        "CPU": seconds,
        "AS": memory,
        "FSIZE": file,
        "CORE": 0,
        "NOFILE": 64,
        # the superuser is exempt from it; the audit hook refuses new processes
        "NPROC": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):
            # macOS refuses a limit of the address space
            if sys.platform == "linux":
                raise


def isolate(folder: str) -> None:
    """Leave the network, and give up writing outside `folder`, where Linux permits it."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(_NEW_USER | _NEW_NET)
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    writes = sum(bits for first, bits in _WRITES.items() if first <= version)
    handled = ctypes.c_uint64(writes | _EXECUTE)
    rules = libc.syscall(_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if rules < 0:
        return
    # struct landlock_path_beneath_attr is packed: 64 bits of rights, 32 bits of a descriptor
    descriptor = os.open(folder, os.O_RDONLY)
    rule = writes.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
    libc.syscall(_ADD, rules, 1, rule, 0)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_RESTRICT, rules, 0)
    os.close(descriptor)
    os.close(rules)


def refuse(folder: str) -> None:
    """Install a hook that raises PermissionError for what a program under test may not do."""
    inside = os.path.realpath(folder)

    def outside(path: Any) -> bool:
        if isinstance(path, int):
            return False
        real = os.path.realpath(os.fsdecode(path))
        return os.path.commonpath([inside, real]) != inside

    def check(event: str, args: tuple) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"a program under test may not use {event}")
        paths: tuple = args[: _CHANGES.get(event, 0)]
        if event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS:
            paths = args[:1]
        for path in paths:
            if path is not None and outside(path):
                raise PermissionError(f"a program under test may not change {path!r}")

    sys.addaudithook(check)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    folder = os.getcwd()
    isolate(folder)
    limit(job["seconds"], job["memory"], job["file"])
    refuse(folder)
    # compiled apart, so that an open string or block of the program cannot contain the test
    parts: list[CodeType] = [
        compile(job["program"], "program", "exec"),
        compile(job["test"], "test", "exec"),
        compile(f"check({job['entry_point']})", "check", "exec"),
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    for part in parts:
        exec(part, names)
    os.write(report, job["token"].encode())
    # without the program's exit handlers and threads
    os._exit(0)


if __name__ == "__main__":
    main()
