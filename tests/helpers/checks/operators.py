"""A step on the public operators, as `torch.library` has registered each."""

from csd.kernels.attention import tree_attention
from csd.kernels.attention.commit_kv import commit_kv
from csd.kernels.attention.layout import with_layout
from csd.kernels.attention.triton.plan import plan_attention
from csd.kernels.draft import draft_tree
from csd.kernels.layers.rms_norm import rms_norm
from csd.kernels.layers.rotary import rotary
from csd.kernels.layers.swiglu import swiglu
from csd.kernels.ops import Ops
from csd.kernels.states.advance import advance_state
from csd.kernels.states.conv import commit_tail, tree_conv
from csd.kernels.states.delta_rule import tree_delta_rule, tree_ssm
from csd.kernels.table import graph_insert
from csd.kernels.table.observe import observe
from csd.kernels.verify import verify
from csd.kernels.verify.advance_slots import advance_slots
from csd.kernels.verify.snapshot import snapshot
from csd.state.pool_builder import node_costs, prune, roots

OPERATORS = Ops(
    name="operators",
    rms_norm=rms_norm,
    rotary=rotary,
    swiglu=swiglu,
    plan_attention=with_layout(plan_attention),
    tree_attention=with_layout(tree_attention),
    verify=verify,
    verify_all=verify,
    commit_kv=commit_kv,
    advance_slots=advance_slots,
    roots=roots,
    node_costs=node_costs,
    prune=prune,
    draft_tree=draft_tree,
    observe=observe,
    graph_insert=graph_insert,
    snapshot=snapshot,
    tree_conv=tree_conv,
    tree_delta_rule=tree_delta_rule,
    tree_ssm=tree_ssm,
    advance_state=advance_state,
    commit_tail=commit_tail,
)
