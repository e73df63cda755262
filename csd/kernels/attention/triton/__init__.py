"""Triton kernels of tree attention."""
