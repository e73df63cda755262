"""Parts of the loops that numba compiles for the CPU at hand."""
