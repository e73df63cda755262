"""Constants that the references, loops and kernels of layers share."""

import math

LINEAR = (8 / math.pi) ** 0.5

CUBIC = 0.044715 * LINEAR
