"""Every operation of a step as a function on tensors, usable without the rest of csd.

One file holds one operation: its formula, a plain PyTorch reference (`<op>_ref`), the Triton
kernel, the launcher (`<op>_triton`), the operator (`torch.ops.csd.<op>`) and the public function
(`<op>`). A large operation is a package in the same order: `__init__` holds the formula, the
operator and the public function, `launch` the launcher, `reference` the reference, `constants` what
kernels and reference share, and a file each of the kernels' steps. Nothing here imports anything of
csd but `csd.state` and `csd.schema`. A module is imported when it is first named.

Dimensions have one letter each, the same in every file:

    G   prompts (groups) in flight          H   query heads
    S   slots (samples in flight)           K   key-value heads
    M   rows of the step's node pool        D   head size
    V   vocabulary                          L   layers
    E   successors kept for a context       C   contexts the graph can hold
    N   longest context (tokens)            P   splits of a long KV

The sentinel is -1: a padding row of the pool has slot -1, an absent token or page is -1.
"""

from typing import TYPE_CHECKING

from csd.schema.lazy import submodules

if not TYPE_CHECKING:
    __getattr__ = submodules(__name__)
