"""Warnings that point to the line of the user's code that called csd."""

import contextlib
import sys
import warnings
from pathlib import Path

# csd's own files, and that of decorators around its functions
INSIDE = (str(Path(__file__).parents[1]), contextlib.__file__)


def warn_caller(text: str) -> None:
    """Issue a UserWarning at the innermost line outside csd, or at csd's outermost line."""
    # level 2 is the caller of this function
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
