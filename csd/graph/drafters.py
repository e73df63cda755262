"""Drafters by name."""

from collections.abc import Callable

import torch

from csd.graph.drafter import Drafter
from csd.kernels.ops import Ops

DRAFTERS = (
    "consensus", "prompt-lookup", "paper", "paper-tree", "rest:PATH", "recycling", "suffix",
    "suffix-tree",
)  # fmt: skip


def known(name: str | Callable) -> bool:
    """Whether `make_drafter` takes it."""
    if callable(name):
        return True
    return (name in DRAFTERS and name != "rest:PATH") or _path(name) is not None


def make_drafter(name: str | Callable, ops: Ops, device: str | torch.device) -> Drafter:
    """A new drafter without any text in it; `name` may be a function (ops, device) -> Drafter."""
    if callable(name):
        return name(ops, device)
    if not known(name):
        raise ValueError(f"drafter must be one of {', '.join(map(repr, DRAFTERS))}, got {name!r}")
    if name == "consensus":
        from csd.graph.consensus import ConsensusGraph

        return ConsensusGraph(ops, device)
    if name == "prompt-lookup":
        from csd.graph.lookup import PromptLookup

        return PromptLookup()
    if name in ("paper", "paper-tree"):
        from csd.graph.paper import Paper

        return Paper(tree=name == "paper-tree")
    if name == "recycling":
        from csd.graph.recycling import Recycling

        return Recycling()
    if name in ("suffix", "suffix-tree"):
        from csd.graph.suffix import Suffix

        # the second with what made it best on recorded samples
        return Suffix() if name == "suffix" else Suffix(True, factor=4, offset=4, least=0)
    from csd.graph.rest import Rest

    path = _path(name)
    assert path is not None
    return Rest(path)


def _path(name: str | Callable) -> str | None:
    if isinstance(name, str) and name.startswith("rest:") and len(name) > 5:
        return name[5:]
    return None
