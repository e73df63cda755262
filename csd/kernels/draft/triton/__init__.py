"""Triton kernels that draft the trees of a step: `grow.py`, then `fill.py` (`launch.py`)."""
