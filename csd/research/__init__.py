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
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from csd.cli import COMMANDS
from csd.graph.drafter import Drafter, Verifier
from csd.graph.registry import register, register_verifier
from csd.kernels.ops import Ops
from csd.utils.lazy import submodules

if TYPE_CHECKING:
    from csd.research import baselines, verify
    from csd.research.draft_models.draft_model import DraftModel
    from csd.research.draft_models.eagle import Eagle
    from csd.research.training.train_head import train_head

_submodule = submodules(__name__)

__all__ = ["DraftModel", "Eagle", "baselines", "train_head", "verify"]


# public names -> the modules that define them
_MODULES = {
    "DraftModel": "draft_models.draft_model",
    "Eagle": "draft_models.eagle",
    "train_head": "training.train_head",
}


def __getattr__(name: str) -> Any:
    """The public names, imported at the first access."""
    return _defined(_MODULES[name], name) if name in _MODULES else _submodule(name)


def _defined(module: str, name: str) -> Any:
    return getattr(import_module(f"{__name__}.{module}"), name)


def _register(name: str, module: str, kind: str, **settings: Any) -> None:
    """Register a drafter: the class `kind` of a module of `baselines`, made with `settings`."""

    def make(ops: Ops, device: str | torch.device, *path: str) -> Drafter:
        return _defined(f"baselines.{module}", kind)(*path, **settings)

    register(name, make)


def _multi_draft(drafter: Any, ops: Ops, name: str) -> Verifier:
    return _defined("verify.multi_draft", "MultiDraftVerifier")(name, drafter, ops)


def _train_head(commands: _SubParsersAction) -> None:
    _defined("training.command", "add")(commands)


_register("prompt-lookup", "prompt_lookup", "PromptLookup")
# exact matches, also of fewer tokens: they commit more
_register("paper-shrinking", "multi_sample_paper", "Paper", edits=0, shrink=True)
_register("paper-shrinking-tree", "multi_sample_paper", "Paper", tree=True, edits=0, shrink=True)
_register("rest:PATH", "rest", "Rest")
_register("recycling", "recycling", "Recycling")
_register("suffix", "suffix", "Suffix")
# the settings that were best on recorded samples
_register("suffix-tree", "suffix", "Suffix", tree=True, factor=4, offset=4, least=0)
for _name in ("canonical", "recursive", "kseq", "single"):
    register_verifier(_name, partial(_multi_draft, name=_name))
COMMANDS.append(_train_head)
