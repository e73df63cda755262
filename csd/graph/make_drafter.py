"""Drafters by name."""

from collections.abc import Callable
from typing import Any

import torch

from csd.graph.drafter import Drafter
from csd.graph.model.draft_model import Drafting
from csd.kernels.ops import Ops
from csd.schema.arguments import takes
from csd.schema.check import shown

DRAFTERS = (
    "consensus", "prompt-lookup", "paper", "paper-tree", "paper-shrinking", "paper-shrinking-tree",
    "rest:PATH", "recycling", "suffix", "suffix-tree",
)  # fmt: skip


def check_known(name: Any) -> None:
    """Raises TypeError or ValueError, naming `drafter`, for what `make_drafter` does not take."""
    if isinstance(name, str):
        if (name in DRAFTERS and name != "rest:PATH") or _path(name) is not None:
            return
    elif isinstance(name, Drafting) or _makes(name):
        return
    kind = ValueError if isinstance(name, str) else TypeError
    raise kind(
        f"drafter must be one of {', '.join(map(repr, DRAFTERS))}, a csd.DraftModel, a csd.Eagle "
        f"or a function of (operations, device), got {shown(name)}"
    )


def _makes(name: Any) -> bool:
    """Whether it can be called with (operations, device), and is not a class of something else."""
    return takes(name, 2) and (not isinstance(name, type) or issubclass(name, Drafter))


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
    check_known(name)
    if not isinstance(name, str):
        made = name(ops, device)
        if not isinstance(made, Drafter):
            raise TypeError(f"drafter must make a Drafter, got {shown(made)} from {shown(name)}")
        return made
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


def _path(name: str) -> str | None:
    if name.startswith("rest:") and len(name) > 5:
        return name[5:]
    return None
