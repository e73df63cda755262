"""`attn_implementation="csd_tree"`: the tree attention inside a stock `transformers` model.

    model.set_attn_implementation("csd_tree")
    logits = model(**tree.inputs).logits[0]    # [M, V], with tree a csd.Tree or a csd.PackedTree

A forward call without `tree=` runs `sdpa` with its masks. With `tree=`, the batch has one row of M
tokens. Those of a `csd.Tree` are nodes of draft trees: csd's kernel lets each attend to its prompt,
its sample's committed tokens and its ancestors. Those of a `csd.PackedTree` are whole samples
without repeated prefixes, and their attention has a backward.

`import csd` does not import transformers. The name is registered once transformers' models are
imported, before csd or after it.
"""

import importlib.abc
import importlib.util
import inspect
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from csd.integrations.transformers.packed_tree import PackedTree
from csd.integrations.transformers.tree import Tree

NAME = "csd_tree"
MODELS = "transformers.modeling_utils"
# arguments that a model may pass to its attention and that trees do not support, or not all
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")


def register_attention() -> None:
    """Register "csd_tree" in transformers' attention and mask interfaces. Imports transformers."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def register_when_imported() -> None:
    """Register now if transformers' models are imported, else as soon as they are."""
    if MODELS in sys.modules:
        register_attention()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls `register_attention` once `MODELS` is executed, and removes itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register_attention()

            # the loader object belongs to this import, so the patch affects no other
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def tree_attention_forward(
    module: Any,
    query: torch.Tensor,  # [B, H, M, D]
    key: torch.Tensor,  # [B, K, T, D]
    value: torch.Tensor,  # [B, K, T, D]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Tree | PackedTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer. Returns [B, M, H, D] and None. tree: None for sdpa.

    With a tree, B is 1, T is M, and `attention_mask` is ignored: the tree is the mask.
    """
    # `Tree.inputs` has a mask of one element, which no model makes for several rows
    masks = attention_mask is not None and attention_mask.shape[-2:] == (1, 1)
    if tree is None:
        if masks and query.shape[-2] > 1:
            raise ValueError(
                f"tree must be passed on to the attention, got None in {type(module).__name__}: "
                "csd_tree does not support this family, which drops the argument"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None and not masks:
        raise ValueError(
            "attention_mask must be that of tree.inputs, got one of shape "
            f"{tuple(attention_mask.shape)} in {type(module).__name__}: csd_tree does not support "
            "families that make their own masks"
        )
    if not _takes_positions(type(module).__module__):
        raise ValueError(
            "position_ids must give the positions of the tree's nodes, but the family of "
            f"{type(module).__name__} does not take them: csd_tree does not support it"
        )
    properties = {name: kwargs[name] for name in UNSUPPORTED if kwargs.get(name) is not None}
    supported = PackedTree.properties if isinstance(tree, PackedTree) else {}
    other = [name for name in properties if name not in supported]
    if other:
        got = properties[other[0]]
        raise ValueError(f"{other[0]} must be None for tree attention, got {got!r}")
    if dropout:
        raise ValueError(f"dropout must be 0 for tree attention, got {dropout}: call model.eval()")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(tree, PackedTree):
        return tree.attend(module, query, key, value, scale, **properties), None
    out = tree.attend(module.layer_idx, query, key, value, scale)
    tree.count(module.layer_idx)
    return out, None


@cache
def _takes_positions(file: str) -> bool:
    """True if every causal language model of the module `file` has an argument `position_ids`.

    Others, such as the decoders of encoder-decoder families, count positions from the cache's
    length, and silently pass arguments that they do not have on to their layers.
    """
    models = [x for name, x in vars(sys.modules[file]).items() if name.endswith("ForCausalLM")]
    return all("position_ids" in inspect.signature(x.forward).parameters for x in models)
