"""Constants that the reference and the kernel of the layered graph share."""

# from multiples of 2^-32 to those of 1 / ONE
SHIFT = 8
