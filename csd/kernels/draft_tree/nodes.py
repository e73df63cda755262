"""The slot's sorted list of nodes: merges of a level's children into it."""

import triton
import triton.language as tl


@triton.jit
def by_place(place, value, W: tl.constexpr):
    """[W]: the values [C] whose places [C], all different, are 0, 1, ..; 0 where none has it."""
    hit = place[:, None] == tl.arange(0, W)[None, :]
    return tl.sum(tl.where(hit, value[:, None], 0), 0)


@triton.jit
def ranks(nodes, child):
    """Each child's place among the children [C], and its place and each node's [n] in both lists.

    nodes: sorted. Everything is compared with everything: a sort's steps wait for each other.
    """
    offs_c = tl.arange(0, child.shape[0])
    # [C, C] and [n, C]: those that come before, down
    other = child[:, None]
    before = (other < child[None, :]) | (
        (other == child[None, :]) & (offs_c[:, None] < offs_c[None, :])
    )
    rank = tl.sum(before.to(tl.int32), 0)
    place = rank + tl.sum((nodes[:, None] <= child[None, :]).to(tl.int32), 0)
    cheaper = tl.sum((other < nodes[None, :]).to(tl.int32), 0)
    return rank, place, tl.arange(0, nodes.shape[0]) + cheaper
