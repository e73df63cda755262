"""The CPU of a measurement: its model, instruction sets, and libraries for matrix products."""

import os
import re

import torch

from csd.utils.device import cpu_name, instructions

# environment variables that change the kernel of a product or its number of threads
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NPY_DISABLE_CPU_FEATURES",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "TRITON_INTERPRET",
)


def processor() -> dict:
    """CPU model, cores, instruction sets, libraries, threads, and the VARIABLES that are set."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "instructions": instructions(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **libraries(torch.__config__.show()),
        "cpu_threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def libraries(config: str) -> dict:
    """BLAS and oneDNN that PyTorch was built with, from `torch.__config__.show()`."""
    blas = re.search(r"BLAS_INFO=(\w+)", config)
    mkl = re.search(r"Math Kernel Library Version ([\d.]+)", config)
    openblas = re.search(r"OpenBLAS[^\d\n]*([\d.]+)", config)
    version = mkl if blas and blas[1] == "mkl" else openblas
    onednn = re.search(r"(?:MKL-DNN|oneDNN)\D*v([\d.]+)", config)
    return {
        "blas": f"{blas[1]} {version[1] if version else ''}".strip() if blas else None,
        "onednn": onednn[1] if onednn else None,
    }
