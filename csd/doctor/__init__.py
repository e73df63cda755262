"""`csd doctor`: compares each operation with its reference, on this machine.

A small model of random weights, with a model's head sizes and vocabulary, draws a few samples of a
long and a short prompt (`run.py`). Each call of an operation is repeated by its reference on copies
on the CPU: integers must be equal, and floats within a few roundings (`compare.py`). The loops,
splits and chunks that ran are counted (`coverage.py`). Operations that this model does not use are
run on their own (`cases.py`). Then the same call, run with other steps, must commit the same
tokens.
"""

from csd.doctor.cases import SMALL, CheckSizes
from csd.doctor.report import Check, Report
from csd.doctor.run import check

__all__ = ["SMALL", "Check", "CheckSizes", "Report", "check"]
