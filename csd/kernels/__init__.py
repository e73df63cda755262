"""Every operation of a step as a function on tensors, usable without the rest of csd:

    from csd.kernels import rms_norm, tree_attention

and modules of a layer for your own model: `RMSNorm`, `GatedMLP`, `Rotary`.

A folder holds the operations of one subject: `attention`, `layers`, `states`, `table`, `draft`,
`texts`, `verify`. The file of an operation has its formula, a reference in plain PyTorch or numpy
(`<op>_ref`), the launcher (`<op>_triton`), the operator (`torch.ops.csd.<op>`) and the public
function (`<op>`). Of the large operations after which `attention`, `table`, `draft` and `verify`
are named, `__init__` has the formula, the operator and the public function, and `reference.py` the
reference. `triton/` has the Triton kernels, launchers of large operations, and the operations that
only a GPU needs, such as a step's work list. `cpu/` has the loops of the backend "cpu". Both are
imported when an operation first runs there. `common` has parts that operations share, and `numba`
parts that loops share.

`ops.py` and `cpu_ops.py` list a step's operations by backend, and `backends.py` chooses a backend.
This package imports only `csd.state` and `csd.utils` of csd. Modules that are not imported here
are imported on first access.

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

from csd.kernels.attention import TreeLayout, tree_attention
from csd.kernels.attention.commit_kv import commit_kv
from csd.kernels.attention.packed import (
    PackedLayout,
    pack_rows,
    packed_attention,
    packed_attention_backward,
)
from csd.kernels.draft import draft_tree
from csd.kernels.layers import GatedMLP, RMSNorm, Rotary
from csd.kernels.layers.gated_linear import gated_linear
from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotary, rotate
from csd.kernels.layers.row_linear import row_linear
from csd.kernels.layers.swiglu import silu_mul, swiglu
from csd.kernels.states.advance import advance_state
from csd.kernels.states.conv import commit_tail, tree_conv
from csd.kernels.states.delta_rule import tree_delta_rule, tree_ssm
from csd.kernels.states.paths import tree_paths
from csd.kernels.table import graph_insert
from csd.kernels.table.observe import observe

# loading this package binds its name here; the function of the same name then replaces it
from csd.kernels.verify import verify
from csd.kernels.verify.advance_slots import advance_slots
from csd.kernels.verify.snapshot import snapshot
from csd.utils.lazy import submodules

__all__ = [
    "GatedMLP",
    "PackedLayout",
    "RMSNorm",
    "Rotary",
    "TreeLayout",
    "advance_slots",
    "advance_state",
    "commit_kv",
    "commit_tail",
    "draft_tree",
    "exact_attention",
    "gated_linear",
    "graph_insert",
    "merge_partials",
    "observe",
    "pack_rows",
    "packed_attention",
    "packed_attention_backward",
    "plan_attention",
    "plan_exact",
    "rms_norm",
    "rotary",
    "rotate",
    "row_linear",
    "silu_mul",
    "snapshot",
    "swiglu",
    "tree_attention",
    "tree_conv",
    "tree_delta_rule",
    "tree_paths",
    "tree_ssm",
    "verify",
]

if TYPE_CHECKING:
    from csd.kernels.attention.triton.exact import exact_attention, plan_exact
    from csd.kernels.attention.triton.merge import merge_partials
    from csd.kernels.attention.triton.plan import plan_attention
else:
    _module = submodules(__name__)

    def __getattr__(name):
        # operations that only a GPU needs stand in files that import Triton
        if name in ("exact_attention", "plan_exact"):
            from csd.kernels.attention.triton import exact as owner
        elif name == "merge_partials":
            from csd.kernels.attention.triton import merge as owner
        elif name == "plan_attention":
            from csd.kernels.attention.triton import plan as owner
        else:
            return _module(name)
        return getattr(owner, name)


def __dir__() -> list[str]:
    return __all__
