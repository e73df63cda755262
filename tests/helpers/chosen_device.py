"""The device of the tests; imported before torch and triton, which read what this sets.

With CSD_TEST_DEVICE=cuda compiled kernels are launched on a GPU. Else none is there, whatever the
machine has: a model that is loaded by name would go to it, with interpreted kernels. With
CSD_PTX=sm_90 kernels run as compiled for that chip, instruction by instruction (tools/ptx).
"""

import os

DEVICE = os.environ.get("CSD_TEST_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
COMPILED = ON_GPU or bool(os.environ.get("CSD_PTX"))

if not ON_GPU:
    # an empty list hides all of NVIDIA's; AMD's runtimes take it for none given
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["HIP_VISIBLE_DEVICES"] = os.environ["ROCR_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TRITON_INTERPRET", "0" if COMPILED else "1")
