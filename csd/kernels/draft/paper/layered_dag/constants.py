"""Constants that the reference and the kernel of the layered graph share."""

# right shift from multiples of 2^-32 to multiples of 1 / ONE
SHIFT = 8
