"""Run one program and its tests with limits; this file is the script of a process of its own.

Standard input has a line of JSON, with the limits and the program, and then the tests. The value
that the last line of the tests computes is written to standard output: a program that ends the
process earlier, whatever its exit status, or that replaces `exec`, writes none. The tests are read
when the program has run. It imports nothing of csd, so that it starts fast.

The audit hook is for accidents, such as a program that removes the wrong folder. It is no boundary.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

# events of sys.addaudithook that start processes, signal others, or use a network
_REFUSED = (
    "os.exec",
    "os.fork",
    "os.kill",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostby",
    "socket.sendmsg",
    "socket.sendto",
    "subprocess.Popen",
)
# events that change a path, with the number of their first arguments that are paths
_CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
    "sqlite3.connect": 1,
}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(seconds: int, memory: int, file: int) -> None:
    """Set limits of this process: CPU seconds, bytes of address space, bytes of a file."""
    import resource

    limits = {"CPU": seconds, "AS": memory, "FSIZE": file, "CORE": 0, "NOFILE": 64}
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


def refuse(folder: str) -> None:
    """Install a hook that raises PermissionError for what a program under test may not do."""
    inside = os.path.realpath(folder)

    def outside(path: Any) -> bool:
        if isinstance(path, int):
            return False
        real = os.path.realpath(os.fsdecode(path))
        return real != os.devnull and os.path.commonpath([inside, real]) != inside

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
    # the program may replace any of them
    run, read, write, leave = exec, compile, os.write, os._exit
    given, report = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    job = json.loads(given.readline())
    limit(**job["limits"])
    refuse(os.getcwd())
    # not __main__, so that a main part does not run; a dataclass looks its module up
    module = sys.modules["program"] = ModuleType("program")
    names = module.__dict__
    try:
        # compiled apart, so that an open string or block of the program cannot contain the tests
        run(read(job["program"], "program", "exec"), names)
        run(read(given.read(), "tests", "exec"), names)
        write(report, names["__passed__"].encode())
    finally:
        # without the program's exit handlers and threads
        leave(0)


if __name__ == "__main__":
    main()
