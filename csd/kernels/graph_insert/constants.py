"""Constants that the reference and the kernels of an insert share."""

# an entry touched this many inserts ago or earlier counts as equally old
MAX_AGE = (1 << 26) - 1
