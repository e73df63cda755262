"""The loops of verification, as `csd.kernels.verify.passes.Passes`."""

from csd.cpu.accepted_paths import descend
from csd.cpu.distribution_heads import heads, log_sum
from csd.cpu.draws import draw
from csd.kernels.verify.passes import Passes

PASSES = Passes(heads, log_sum, draw, descend)
