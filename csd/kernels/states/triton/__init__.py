"""Triton kernels of this folder's operations."""
