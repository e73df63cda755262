"""The three backends of a step's operations, by the names that `kernels=` takes.

"reference": PyTorch and numpy, the definition. "cpu": loops that numba compiles (the folders
`cpu`). "triton": the kernels of a GPU. A backend without an operation runs the reference's, and
`csd doctor --ops` lists these operations.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import torch

from csd.kernels.common.cpu import DTYPES, compiles, fused_arithmetic
from csd.kernels.common.gpu import BFLOAT16_SINCE, has_bfloat16
from csd.kernels.common.operator import check_triton
from csd.kernels.ops import Ops, reference, triton
from csd.utils.check import shown

NAMES = ("reference", "cpu", "triton")
# PyTorch's threads to a loop's one beyond which its own operations are faster than loops
MAX_THREADS = 4


def choose(kernels: str | None, device: torch.device, dtype: torch.dtype) -> Ops:
    """The backend of that name for tensors of a device and a dtype; `ops.name` has its name.

    None takes "triton" on a GPU. On a CPU it takes "cpu" where numba is installed, the loops have
    the dtype, and PyTorch has at most four threads to one of theirs; else "reference".

    Raises ValueError for a name that is none, or that cannot run here, and for Triton in bfloat16
    on a GPU without its arithmetic; ImportError for "triton" where Triton is not installed.
    """
    if kernels is None:
        if device.type == "cuda":
            check_triton("a GPU without kernels=")
            check_arithmetic(device, dtype)
            return triton()
        return loops(dtype) if device.type == "cpu" and _loops_pay(dtype) else reference()
    if not isinstance(kernels, str) or kernels not in NAMES:
        raise ValueError(f"kernels must be 'reference', 'cpu' or 'triton', got {shown(kernels)}")
    if kernels == "reference":
        return reference()
    if kernels == "cpu":
        _check_loops(device, dtype)
        return loops(dtype)
    check_triton("kernels='triton'")
    if device.type == "cpu" and not _interpreted():
        raise ValueError(
            "kernels must be 'reference' or 'cpu' on a CPU, got 'triton', which needs a GPU, or "
            "TRITON_INTERPRET=1 set in the environment before csd is imported"
        )
    check_arithmetic(device, dtype)
    return triton()


def check_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError for bfloat16 kernels on a GPU without its arithmetic, as a T4 (sm_75)."""
    if dtype == torch.bfloat16 and not has_bfloat16(device):
        major, minor = torch.cuda.get_device_capability(device)
        since = ".".join(map(str, BFLOAT16_SINCE))
        raise ValueError(
            f"dtype must be float16 or float32 on {torch.cuda.get_device_name(device)} (compute "
            f"capability {major}.{minor}), got bfloat16, which needs {since}: pass "
            "dtype=torch.float16"
        )


def _loops_pay(dtype: torch.dtype) -> bool:
    if not compiles():
        _warn_without_numba()
        return False
    from csd.kernels.cpu_ops import threads

    return dtype in DTYPES and torch.get_num_threads() <= MAX_THREADS * threads()


@cache
def _warn_without_numba() -> None:
    if fused_arithmetic() and find_spec("numba") is None:
        warnings.warn(
            "numba is not installed, so csd runs its reference operations on this CPU, which are "
            "several times slower: pip install numba",
            stacklevel=2,
        )


def _check_loops(device: torch.device, dtype: torch.dtype) -> None:
    names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
    for served, wanted, actual in (
        (device.type == "cpu", "a device 'cpu'", f"'{device.type}'"),
        (find_spec("numba") is not None, "numba: pip install numba", "none"),
        (fused_arithmetic(), "a CPU with fused multiply-add", "one without"),
        (dtype in DTYPES, f"one of {names}", str(dtype).removeprefix("torch.")),
    ):
        if not served:
            raise ValueError(f"kernels='cpu' needs {wanted}; got {actual}")


def for_dtype(ops: Ops, dtype: torch.dtype) -> Ops:
    """`ops` for a network of a dtype of its own, as a draft model's may be."""
    if ops.name != "cpu":
        return ops
    return loops(dtype) if dtype in DTYPES else reference()


def _interpreted() -> bool:
    """True if Triton's kernels run on tensors of the CPU: interpreted, or emulated by a test."""
    from triton.backends.driver import DriverBase
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from csd.kernels.common.triton import philox_word

    if not isinstance(philox_word, JITFunction):
        return True
    try:
        return not isinstance(driver.active, DriverBase)
    except RuntimeError:
        # there is no GPU
        return False


def loops(dtype: torch.dtype = torch.float32) -> Ops:
    """The backend "cpu" (`csd/kernels/cpu_ops.py`)."""
    from csd.kernels.cpu_ops import ops

    return ops(dtype)
