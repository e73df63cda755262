"""Registration of the loops as CPU implementations of the public operations of `csd.kernels`."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from csd.cpu.advance_state import advance_state, reads_states
from csd.cpu.attention import tree_attention
from csd.cpu.commit_kv import commit_kv, reads_commit
from csd.cpu.commit_tail import commit_tail, reads_tail
from csd.cpu.draft_tree import draft_tree
from csd.cpu.graph_insert import graph_insert
from csd.cpu.layers import reads_norm, reads_rotary, reads_swiglu, rms_norm, rotary, swiglu
from csd.cpu.observe import observe, observed_tensors
from csd.cpu.tensor_access import on_host, readable
from csd.cpu.tree_conv import reads_conv, tree_conv
from csd.cpu.tree_states import tree_delta_rule, tree_ssm
from csd.cpu.verify_passes import PASSES
from csd.kernels import advance_state as _advance_state  # noqa: F401, enters the operation
from csd.kernels import commit_tail as _commit_tail  # noqa: F401
from csd.kernels import tree_conv as _tree_conv  # noqa: F401
from csd.kernels import tree_ssm as _tree_ssm  # noqa: F401, with `tree_delta_rule`
from csd.kernels.draft_tree import with_config
from csd.kernels.graph_insert import on_table
from csd.kernels.observe import with_config as with_observed_config
from csd.kernels.rms_norm import first_of, of_sum
from csd.kernels.torch_operators import OPERATIONS
from csd.kernels.verify import verify_ref


def _register(name: str, takes: Callable[..., bool], loop: Callable) -> None:
    """Sets an operation's loop; takes: predicate of the arguments that the loop reads."""
    found = OPERATIONS[name]
    found.takes, found.loop = takes, loop


@wraps(tree_attention)
def _attend(*args: Any) -> None:
    *keys, layout, scale, _work, out, window, chunk, softcap, sinks = args
    tree_attention(
        *keys, **layout._asdict(), scale=scale, out=out, window=window, chunk=chunk,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip


_register("rms_norm", reads_norm, first_of(rms_norm))
_register("add_rms_norm", reads_norm, of_sum(rms_norm))
_register("rotary", reads_rotary, rotary)
_register("swiglu", reads_swiglu, swiglu)
_register("tree_attention", lambda *args: readable(*args[:5]), _attend)
_register("tree_conv", lambda *args: reads_conv(*args[:4]), tree_conv)
_register("tree_delta_rule", lambda *args: reads_states(*args[:10]), tree_delta_rule)
_register("tree_ssm", lambda *args: reads_states(*args[:8]), tree_ssm)
_register("advance_state", lambda *args: reads_states(*args[:4]), advance_state)
_register("commit_tail", lambda *args: reads_tail(*args[:2]), commit_tail)
_register("commit_kv", lambda *args: reads_commit(*args[:4]), commit_kv)
_register(
    "verify", lambda logits, pool, slots: readable(logits), partial(verify_ref, passes=PASSES)
)
_register("draft_tree", lambda table, slots, *others: on_host(slots.live), with_config(draft_tree))
_register(
    "observe",
    lambda pool, slots, verdict, *weights: on_host(*observed_tensors(pool, slots, verdict)),
    with_observed_config(observe),
)
_register(
    "graph_insert", lambda table, ways, *rows_and_orders: on_host(table["step"]),
    on_table(graph_insert),
)  # fmt: skip
