"""Rows of a step as distinct texts: samples with equal text share their rows.

Slots of a group whose samples have the same tokens so far are a **class**. Its leader is one of
them; `Slots.leader` is the same for all slots of a class, and different for others. A step computes
one root and one draft tree for a class: the union of the trees that its members draft with their
own noise, where a node's probability is the sum over the members that draft it,

    cost(node) = -log2(sum over members of 2^-cost(member's node))

so it may be negative, and a child never costs less than its parent, since a member drafts a node
only below one that it also drafts. A class of one has its member's tree as it is.

    merge    member trees -> class trees, whose rows the model computes (`Pool`)
    spread   class trees -> a copy for every member, with the row that computes each node (`Texts`)
    part     after the step, members that have accepted different tokens become different classes

Every member walks the whole tree with its own noise and filters, so members that draw the same
tokens stay together. Classes follow from accepted tokens alone.
"""
