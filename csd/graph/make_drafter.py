"""Drafters by name."""

from collections.abc import Callable

import torch

from csd.graph.drafter import Drafter
from csd.graph.model.draft_model import Drafting
from csd.kernels.ops import Ops

DRAFTERS = (
    "consensus", "prompt-lookup", "paper", "paper-tree", "paper-shrinking", "paper-shrinking-tree",
    "rest:PATH", "recycling", "suffix", "suffix-tree",
)  # fmt: skip


def known(name: str | Callable) -> bool:
    """Whether `make_drafter` takes it."""
    if callable(name):
        return True
    return (name in DRAFTERS and name != "rest:PATH") or _path(name) is not None


def make_drafter(
    name: str | Callable,
    ops: Ops,
    device: str | torch.device,
    tokens: int = 0,
    history: bool = False,
) -> Drafter:
    """A new drafter without any text in it; `name` may be a function (ops, device) -> Drafter.

    tokens, history: as `Drafter.suits` has them.
    """
    if isinstance(name, Drafting):
        return name.make(ops, device, tokens, history)
    if callable(name):
        return name(ops, device)
    if not known(name):
        raise ValueError(f"drafter must be one of {', '.join(map(repr, DRAFTERS))}, got {name!r}")
    if name == "consensus":
        from csd.graph.consensus import ConsensusGraph

        return ConsensusGraph(ops, device, tokens=tokens, history=history)
    if name == "prompt-lookup":
        from csd.graph.rivals.prompt_lookup import PromptLookup

        return PromptLookup()
    if name in ("paper", "paper-tree"):
        from csd.graph.layered import LayeredDag
        from csd.state.texts import DagConfig

        return LayeredDag(ops, device, DagConfig(tree=name == "paper-tree"))
    if name in ("paper-shrinking", "paper-shrinking-tree"):
        from csd.graph.rivals.paper import Paper

        # exact matches of fewer tokens, which commit more
        return Paper(tree=name == "paper-shrinking-tree", edits=0, shrink=True)
    if name == "recycling":
        from csd.graph.rivals.recycling import Recycling

        return Recycling()
    if name in ("suffix", "suffix-tree"):
        from csd.graph.rivals.suffix import Suffix

        # the second with what made it best on recorded samples
        return Suffix() if name == "suffix" else Suffix(True, factor=4, offset=4, least=0)
    from csd.graph.rivals.rest import Rest

    path = _path(name)
    assert path is not None
    return Rest(path)


def _path(name: str | Callable) -> str | None:
    if isinstance(name, str) and name.startswith("rest:") and len(name) > 5:
        return name[5:]
    return None
