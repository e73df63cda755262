"""Number of inputs that a fuzzer tries, and its time limit for one of them."""

import os
import secrets
import signal
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

# `make test-long` sets it; without it a fuzzer tries the same inputs every time
MANY = float(os.environ.get("CSD_EXAMPLES", 0))


def examples(few: int, many: int) -> settings:
    """`few` inputs, or `many` times CSD_EXAMPLES, a share of one or more, where that is set."""
    return settings(
        max_examples=int(many * MANY) or few,
        derandomize=not MANY,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def cases(few: int, many: int) -> list[int]:
    """Seeds: `few` of them, or `many` times CSD_EXAMPLES where that is set, new ones every time."""
    count = int(many * MANY)
    return [secrets.randbits(48) for _ in range(count)] if count else [*range(few)]


@contextmanager
def at_most(seconds: float):
    """Raises TimeoutError once the block has computed for so long; waiting does not count."""

    def late(*_):
        raise TimeoutError(f"still computing after {seconds} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
