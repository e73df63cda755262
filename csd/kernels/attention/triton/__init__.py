"""Triton kernels of tree attention: a step's work list, the layers' launches, and the exact form."""
