"""Drafters by name."""

DRAFTERS = ("consensus",)


def make_drafter(name: str, ops, device):
    """A new drafter without any text in it."""
    if name == "consensus":
        from csd.graph.consensus import ConsensusGraph

        return ConsensusGraph(ops, device)
    raise ValueError(f"drafter must be one of {', '.join(map(repr, DRAFTERS))}, got {name!r}")
