"""Configurations of the graph that are compiled and timed in addition to the default."""

from csd.state.context_table import GraphConfig

SHALLOW = GraphConfig(orders=(1, 2, 3, 4), max_depth=8)
DEEP = GraphConfig(orders=(1, 2, 3, 4, 5, 6, 7, 8), successors=8, max_depth=16)
