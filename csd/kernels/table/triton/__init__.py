"""Triton kernels of insertion into the graph's table: `claim.py`, then `merge.py` (`launch.py`)."""
