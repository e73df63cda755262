"""Compilation of every kernel for GPUs that this machine does not have, and its resource use.

launches    a step's operations at a model's shape, on tensors without memory
record      the compilation jobs that these launches create in Triton for a target
compile     compilation of one job to the binary
run         all jobs of some targets, dtypes and shapes, in several processes
"""

from bench.gpu.aot.record import OLDER, TARGETS
from bench.gpu.aot.run import problems, run, table
from bench.lib.kernel_shape import OTHER_SHAPES, SHAPES, Shape

__all__ = ["OLDER", "OTHER_SHAPES", "SHAPES", "TARGETS", "Shape", "problems", "run", "table"]
