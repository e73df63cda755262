"""Every kernel compiled for GPUs that are not there, and what each of them uses.

launches    a step's operations at a model's shape, on tensors without memory
record      the compilation jobs that these launches give Triton for a target
compile     one job compiled down to the binary
run         all jobs of some targets, dtypes and shapes, in processes
"""

from bench.gpu.aot.record import TARGETS
from bench.gpu.aot.run import problems, run, table
from bench.lib.kernel_shape import OTHER_SHAPES, SHAPES, Shape

__all__ = ["OTHER_SHAPES", "SHAPES", "TARGETS", "Shape", "problems", "run", "table"]
