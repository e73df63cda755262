"""Triton kernels of insertion into the consensus graph."""
