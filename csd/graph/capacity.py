"""Capacity of the graph's table."""

from collections.abc import Sequence
from itertools import accumulate

from csd.graph.history import PastSample
from csd.state.context_table import GraphConfig

# contexts of a table, which take 41 and 330 MB with the sizes of `GraphConfig`
MIN_CAPACITY, MAX_CAPACITY = 1 << 17, 1 << 20


def capacity_for(tokens: int, config: GraphConfig) -> int:
    """Contexts of a table for `tokens` tokens, each of which follows one context per order."""
    wanted = tokens * len(config.orders)
    return min(max(MIN_CAPACITY, 1 << max(wanted - 1, 0).bit_length()), MAX_CAPACITY)


def max_history(history: Sequence[PastSample], groups: int, config: GraphConfig) -> int:
    """Number of a prompt's past samples that fit, newest first.

    Past samples take at most half of the largest table, in equal parts for the groups in flight.
    """
    room = MAX_CAPACITY // (2 * len(config.orders) * groups)
    return sum(tokens <= room for tokens in accumulate(map(len, history)))
