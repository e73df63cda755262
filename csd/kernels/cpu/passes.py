"""The loops that verification is made of."""

from csd.kernels.cpu.draws import draw
from csd.kernels.cpu.heads import heads, log_sum
from csd.kernels.cpu.paths import descend
from csd.kernels.verify.passes import Passes

PASSES = Passes(heads, log_sum, draw, descend)
