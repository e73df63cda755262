"""Triton kernels of verification."""
