"""Drafters and verifiers by the names of `drafter=` and `verifier=`.

csd's own are here; `csd.research` registers those that they are compared with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from csd.graph.consensus import ConsensusGraph
from csd.graph.drafter import Drafter, DraftSpec, Verifier
from csd.kernels.ops import Ops
from csd.utils.arguments import takes
from csd.utils.check import shown

Maker = Callable[..., Drafter]
# a name "x:PATH" stands for all names that start with "x:"
PATH = ":PATH"


def _paper(ops: Ops, device: str | torch.device, tree: bool) -> Drafter:
    from csd.graph.layered import LayeredDag
    from csd.state.texts import DagConfig

    return LayeredDag(ops, device, DagConfig(tree=tree))


_MAKERS: dict[str, Maker] = {
    "consensus": ConsensusGraph,
    "paper": partial(_paper, tree=False),
    "paper-tree": partial(_paper, tree=True),
}
# verifier other than "match" -> a function (drafter, operations) that makes one for a call
_VERIFIERS: dict[str, Callable[[Any, Ops], Verifier]] = {}


def register(name: str, make: Maker) -> None:
    """Register a drafter. make: a function (operations, device) that makes a new one.

    For a name "x:PATH", `make` gets the text after "x:" of the caller's name as a third argument.

    Raises ValueError for a name that is registered already.
    """
    if name in _MAKERS:
        raise ValueError(f"drafter {name!r} is registered already")
    _MAKERS[name] = make


def register_verifier(name: str, make: Callable[[Any, Ops], Verifier]) -> None:
    """Register a verifier. make: a function (drafter, operations) that makes one for a call.

    Raises ValueError for a name that is registered already.
    """
    if name in verifier_names():
        raise ValueError(f"verifier {name!r} is registered already")
    _VERIFIERS[name] = make


def verifier_names() -> tuple[str, ...]:
    """The names of verifiers, the default first."""
    return ("match", *_VERIFIERS)


def make_verifier(name: str, drafter: Any, ops: Ops) -> Verifier:
    """Make the verifier `name`, not "match", over a drafter.

    Raises ValueError for a drafter that it cannot draw from.
    """
    return _VERIFIERS[name](drafter, ops)


def names() -> tuple[str, ...]:
    """The registered names, the default first."""
    return tuple(_MAKERS)


def check_known(name: Any) -> None:
    """Raise TypeError or ValueError, naming `drafter`, for a value that `make_drafter` refuses."""
    if _maker(name) is not None:
        return
    kind = ValueError if isinstance(name, str) else TypeError
    raise kind(
        f"drafter must be one of {', '.join(map(repr, names()))}, a csd.DraftModel, a csd.Eagle "
        f"or a function of (operations, device), got {shown(name)}"
    )


def _maker(name: Any) -> Maker | None:
    """Function (operations, device) of a name, or the function itself; None for other values."""
    if not isinstance(name, str):
        # not a class, other than a drafter's
        makes = not isinstance(name, type) or issubclass(name, Drafter)
        return name if makes and takes(name, 2) else None
    if name in _MAKERS and not name.endswith(PATH):
        return _MAKERS[name]
    kind, _, path = name.partition(":")
    make = _MAKERS.get(kind + PATH)
    if make is None or not path:
        return None
    return lambda ops, device: make(ops, device, path)


def make_drafter(
    name: str | Callable,
    ops: Ops,
    device: str | torch.device,
    tokens: int = 0,
    history: bool = False,
    prior_contexts: int = 0,
    prior_parts: int = 1,
) -> Drafter:
    """Make a drafter without any text; `name` may be a function (ops, device) -> Drafter.

    tokens, history: as in `Drafter.suits`. prior_contexts, prior_parts: as in `Drafter`.

    Raises ValueError for a prior and a drafter that reads none.
    """
    if prior_contexts and name != "consensus":
        raise ValueError(f"prior needs drafter='consensus', got drafter={shown(name)}")
    if isinstance(name, DraftSpec):
        return name.make(ops, device, tokens, history)
    check_known(name)
    if name == "consensus":
        return ConsensusGraph(
            ops,
            device,
            tokens=tokens,
            history=history,
            prior_contexts=prior_contexts,
            prior_parts=prior_parts,
        )
    make = _maker(name)
    assert make is not None
    made = make(ops, device)
    if not isinstance(made, Drafter):
        raise TypeError(f"drafter must return a Drafter, got {shown(made)} from {shown(name)}")
    return made
