"""The CPU of a measurement: its model, instruction sets, and libraries for matrix products."""

import os
import re

import torch

from csd.utils.device import CPUINFO, cpu_name

# instruction sets that select the kernel of a product, as Linux names them: x86, then ARM
SETS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
    "svebf16",
)
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
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "instructions": instructions(text),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **libraries(torch.__config__.show()),
        "cpu_threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def instructions(cpuinfo: str) -> list[str]:
    """Instruction sets of `SETS` that the first core has, from the text of /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.M)
    have = set(flags[1].split()) if flags else set()
    return [name for name in SETS if name in have]


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
