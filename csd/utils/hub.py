"""The hub's cache in place of the hub where no network reaches it.

Without a network the hub's library asks for each file six times, for minutes in all.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOG = logging.getLogger("csd")

# why the hub is not asked, while a context of `hub_or_cache` is open
_why: str | None = None


def unreached() -> str | None:
    """Returns why the hub cannot be reached, within a `hub_or_cache`; None if it can be."""
    return _why


@contextmanager
def hub_or_cache(name: str) -> Iterator[None]:
    """Context in which the libraries of the hub read their caches, if the hub cannot be reached.

    name: of the hub's files that are wanted, or a path, which needs no hub. Within another such
    context that reads the cache, this one does too.
    """
    global _why
    why = None if os.path.exists(name) or name.endswith(".gguf") else no_hub()
    if why is None:
        yield
        return
    from huggingface_hub import constants

    LOG.warning("%s: only files in its cache are used", why)
    offline: list[Any] = [constants]
    if "datasets" in sys.modules:
        offline.append(sys.modules["datasets"].config)
    before = [module.HF_HUB_OFFLINE for module in offline]
    _why = why
    try:
        for module in offline:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        _why = None
        for module, value in zip(offline, before, strict=True):
            module.HF_HUB_OFFLINE = value


def no_hub() -> str | None:
    """Returns why the hub cannot be reached; None if it answers, or if its library is offline.

    The question is asked on a thread, because no timeout bounds the look-up of a name.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return None
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    failed = [f"no answer within {seconds} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
        except Exception as error:
            # of names, proxies, certificates, timeouts
            failed[0] = str(error) or type(error).__name__
        else:
            failed.clear()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return f"{constants.ENDPOINT} cannot be reached ({failed[0]})" if failed else None
