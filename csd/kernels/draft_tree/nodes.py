"""Merge a level's children into the slot's sorted list of nodes."""

import triton
import triton.language as tl


@triton.jit
def by_place(place, value, W: tl.constexpr):
    """Scatters value [C] to index place [C] of a vector [W] of zeros; places in it are distinct."""
    hit = place[:, None] == tl.arange(0, W)[None, :]
    return tl.sum(tl.where(hit, value[:, None], 0), 0)


@triton.jit
def ranks(nodes, child):
    """Ranks [C] among the children, and places of children [C] and of nodes [n] in the merged list.

    nodes: sorted. All pairs are compared, since the steps of a sort would wait for each other.
    """
    offs_c = tl.arange(0, child.shape[0])
    # [C, C] and [n, C]: along axis 0, the elements that come before
    other = child[:, None]
    before = (other < child[None, :]) | (
        (other == child[None, :]) & (offs_c[:, None] < offs_c[None, :])
    )
    rank = tl.sum(before.to(tl.int32), 0)
    place = rank + tl.sum((nodes[:, None] <= child[None, :]).to(tl.int32), 0)
    cheaper = tl.sum((other < nodes[None, :]).to(tl.int32), 0)
    return rank, place, tl.arange(0, nodes.shape[0]) + cheaper
