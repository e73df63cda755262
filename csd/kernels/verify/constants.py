"""Constants of a row's head, of the reference, the loops and the Triton kernels."""

# exp(-11.1) = 1.5e-5: everything below is drawn as one atom
HEAD_WIDTH = 11.1
# the largest top-k whose tokens are all of the head
MAX_HEAD = 1024
