"""Every operation of a step as a function on tensors, usable without the rest of csd:

    from csd.kernels import rms_norm, tree_attention

and modules of a layer for your own model: `RMSNorm`, `GatedMLP`, `Rotary`.

One file holds one operation: its formula, a plain PyTorch reference (`<op>_ref`), the Triton
kernel, the launcher (`<op>_triton`), the operator (`torch.ops.csd.<op>`) and the public function
(`<op>`). A large operation is a package in the same order: `__init__` holds the formula, the
operator and the public function, `launch` the launcher, `reference` the reference, `constants` the
constants that kernels and reference share, and one file each the steps of the kernels. Of csd, this
package imports only `csd.state` and `csd.schema`. The name of an operation is its function; the
module of the same name is imported by `from csd.kernels.rms_norm import ...`. Other modules are
imported on first access.

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

# an import of a module binds its name in this package; the function then replaces the module
from csd.kernels.advance_slots import advance_slots
from csd.kernels.advance_state import advance_state
from csd.kernels.commit_kv import commit_kv
from csd.kernels.commit_tail import commit_tail
from csd.kernels.draft_tree import draft_tree
from csd.kernels.exact_attention import exact_attention
from csd.kernels.exact_attention.plan import plan_exact
from csd.kernels.gated_linear import gated_linear
from csd.kernels.graph_insert import graph_insert
from csd.kernels.layers import GatedMLP, RMSNorm, Rotary
from csd.kernels.merge_partials import merge_partials
from csd.kernels.observe import observe
from csd.kernels.rms_norm import rms_norm
from csd.kernels.rotary import rotary
from csd.kernels.rotate import rotate
from csd.kernels.row_linear import row_linear
from csd.kernels.snapshot import snapshot
from csd.kernels.swiglu import silu_mul, swiglu
from csd.kernels.tree_attention import TreeLayout, tree_attention
from csd.kernels.tree_attention.plan import plan_attention
from csd.kernels.tree_conv import tree_conv
from csd.kernels.tree_delta_rule import tree_delta_rule
from csd.kernels.tree_paths import tree_paths
from csd.kernels.tree_ssm import tree_ssm
from csd.kernels.verify import verify
from csd.schema.lazy import submodules

__all__ = [
    "GatedMLP",
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

if not TYPE_CHECKING:
    __getattr__ = submodules(__name__)


def __dir__() -> list[str]:
    return __all__
