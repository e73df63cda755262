"""Suppression of lines that other libraries print while they load."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context in which transformers shows no bar over weights, and the hub logs no retries.

    Bars over downloads stay. If a library's own verbosity is set to INFO or lower, its lines stay
    too.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers

    # importing that module sets the level
    hub_logging.get_verbosity()
    hub = logging.getLogger("huggingface_hub")
    asked = logging.NOTSET < hub.level <= logging.INFO
    level = hub.level
    bars = transformers.is_progress_bar_enabled() and transformers.get_verbosity() > logging.INFO
    if bars:
        downloads = not are_progress_bars_disabled()
        transformers.disable_progress_bar()
        if downloads:
            enable_progress_bars()
    if not asked:
        hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)
        if bars:
            transformers.enable_progress_bar()
            if not downloads:
                from huggingface_hub.utils import disable_progress_bars

                disable_progress_bars()


@contextmanager
def without_report() -> Iterator[None]:
    """Context in which transformers prints no table of the keys that a model does not use."""
    from transformers.utils import logging as transformers

    before = transformers.get_verbosity()
    transformers.set_verbosity_error()
    try:
        yield
    finally:
        transformers.set_verbosity(before)
