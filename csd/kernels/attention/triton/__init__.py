"""Triton kernels of tree attention: a step's work list, the launches of a layer, the exact form."""
