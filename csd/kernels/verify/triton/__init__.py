"""Triton kernels of verification: `scan.py`, `sample.py`, then `descend.py` (`launch.py`)."""
