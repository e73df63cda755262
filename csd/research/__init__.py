"""Research: drafters and verifiers that csd's own are compared with, under their published names.

baselines      published drafters that need no network
draft_models   `csd.DraftModel` and `csd.Eagle`: smaller models and EAGLE heads
training       `csd.train_head`, `csd train-head`: EAGLE heads of a model's own samples
verify         schemes that draw their drafts, and bounds of what any scheme accepts

Importing this package registers their names for `drafter=` and `verifier=`, and the command; what a
name stands for is imported when it is first used. Nothing in csd imports this package but `csd`
itself.
"""

from argparse import _SubParsersAction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from csd.cli import COMMANDS
from csd.graph.drafter import Drafter
from csd.graph.registry import register, register_verifier
from csd.graph.verifier import Verifier
from csd.kernels.ops import Ops
from csd.utils.lazy import submodules

if TYPE_CHECKING:
    from csd.research import baselines, verify
    from csd.research.draft_models.draft_model import DraftModel
    from csd.research.draft_models.eagle import Eagle
    from csd.research.training.train_head import train_head

_submodule = submodules(__name__)

__all__ = ["DraftModel", "Eagle", "baselines", "train_head", "verify"]


def __getattr__(name: str) -> Any:
    """The public names, imported at the first access."""
    if name == "DraftModel":
        from csd.research.draft_models.draft_model import DraftModel

        return DraftModel
    if name == "Eagle":
        from csd.research.draft_models.eagle import Eagle

        return Eagle
    if name == "train_head":
        from csd.research.training.train_head import train_head

        return train_head
    return _submodule(name)


def _prompt_lookup(ops: Ops, device: str | torch.device) -> Drafter:
    from csd.research.baselines.prompt_lookup import PromptLookup

    return PromptLookup()


def _shrinking(ops: Ops, device: str | torch.device, tree: bool) -> Drafter:
    from csd.research.baselines.multi_sample_paper import Paper

    # exact matches, also of fewer tokens: they commit more
    return Paper(tree=tree, edits=0, shrink=True)


def _rest(ops: Ops, device: str | torch.device, path: str) -> Drafter:
    from csd.research.baselines.rest import Rest

    return Rest(path)


def _recycling(ops: Ops, device: str | torch.device) -> Drafter:
    from csd.research.baselines.recycling import Recycling

    return Recycling()


def _suffix(ops: Ops, device: str | torch.device, tree: bool) -> Drafter:
    from csd.research.baselines.suffix import Suffix

    # the tree has the settings that were best on recorded samples
    return Suffix(True, factor=4, offset=4, least=0) if tree else Suffix()


def _multi_draft(drafter: Any, ops: Ops, name: str) -> Verifier:
    from csd.research.verify.multi_draft import MultiDraftVerifier

    return MultiDraftVerifier(name, drafter, ops)


def _train_head(commands: _SubParsersAction) -> None:
    from csd.research.training import command

    command.add(commands)


register("prompt-lookup", _prompt_lookup)
register("paper-shrinking", partial(_shrinking, tree=False))
register("paper-shrinking-tree", partial(_shrinking, tree=True))
register("rest:PATH", _rest)
register("recycling", _recycling)
register("suffix", partial(_suffix, tree=False))
register("suffix-tree", partial(_suffix, tree=True))
for _name in ("canonical", "recursive", "kseq", "single"):
    register_verifier(_name, partial(_multi_draft, name=_name))
COMMANDS.append(_train_head)
