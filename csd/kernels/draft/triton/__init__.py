"""Triton kernels that draft the trees of a step."""
