"""How large the graph's table must be for what it will hold."""

from collections.abc import Sequence
from itertools import accumulate

from csd.graph.history import Earlier
from csd.state.context_table import GraphConfig

# contexts: 41 and 330 MB with the sizes of `GraphConfig`
LEAST, MOST = 1 << 17, 1 << 20


def capacity_for(tokens: int, config: GraphConfig) -> int:
    """Contexts of a table in which so many tokens are entered, each after a context an order."""
    wanted = tokens * len(config.orders)
    return min(max(LEAST, 1 << max(wanted - 1, 0).bit_length()), MOST)


def that_fit(history: Sequence[Earlier], groups: int, config: GraphConfig) -> int:
    """How many of a prompt's earlier samples enter, newest first: half of the largest table, at
    most, is for those of all groups in flight."""
    room = MOST // (2 * len(config.orders) * groups)
    return sum(held <= room for held in accumulate(map(len, history)))
