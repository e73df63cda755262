"""Samples of several prompts as one row of tokens that a `transformers` model trains on.

    model.set_attn_implementation("csd_tree")
    packed = csd.PackedTree([prompt], [completions])       # token ids; N completions
    logits = model(**packed.inputs).logits[0]              # [R, V]
    for rows in packed.rows[0]:                            # of one completion
        loss += F.cross_entropy(logits[rows[:-1]], packed.token[rows[1:]])
    loss.backward()

Prompts, and prefixes that completions of a prompt have in common, are computed once: the gradients
are those of one pass per sample up to rounding.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from csd.kernels.attention.packed import PackedLayout, pack_rows, packed_attention

# kinds of layers, in a config's `layer_types`, that a layout of rows determines
ATTENTION = ("full_attention", "sliding_attention")


class PackedTree:
    """R rows of samples; `csd.Tree` is for drafts behind a cache.

    token: [R] int64. `rows[g][n]`: [1 + tokens] int64, the rows of the last token of prompt g and
    of the tokens of completion n: logits of `rows[g][n][:-1]` give its log-probabilities. layout:
    what each row attends to.
    """

    # arguments of an attention, by transformers' names, and those of `packed_attention`
    properties: ClassVar = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}

    def __init__(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor],
        completions: Sequence[Sequence[Sequence[int] | torch.Tensor]],
        device: torch.device | str = "cpu",
    ):
        packed = pack_rows(
            [_ids(prompt) for prompt in prompts],
            [[_ids(tokens) for tokens in samples] for samples in completions],
            device,
        )
        self.token, self.rows = packed.token, packed.rows
        self.layout: PackedLayout = packed.layout

    def __repr__(self) -> str:
        completions = sum(map(len, self.rows))
        return (
            f"<csd.PackedTree of {completions} completions of {len(self.rows)} prompts in "
            f"{len(self.token):,} rows on {self.token.device}>"
        )

    @property
    def inputs(self) -> dict:
        """Arguments of the model's forward call; logits are [1, R, V], row by row."""
        # models pass a mask of four dimensions on unchanged and build none; this one is ignored,
        # and all logits are NaN in a model that does not call the attention that it is set to
        mask = torch.full((1, 1, 1, 1), float("nan"), device=self.token.device)
        return {
            "input_ids": self.token[None],
            "position_ids": self.layout.position[None].long(),
            "attention_mask": mask,
            "tree": self,
            "use_cache": False,
        }

    def attend(
        self,
        module: Any,
        query: torch.Tensor,  # [1, H, R, D]
        key: torch.Tensor,  # [1, K, R, D]
        value: torch.Tensor,  # [1, K, R, Dv]
        scale: float,
        **properties: Any,
    ) -> torch.Tensor:
        """Attention [1, R, H, Dv] of the layer `module`. properties: by transformers' names."""
        R = self.token.shape[0]
        for name, x in (("input_ids", query), ("keys", key), ("values", value)):
            if x.shape[0] != 1 or x.shape[2] != R:
                raise ValueError(
                    f"{name} must be one row of the {R} packed tokens, got {x.shape[0]} of "
                    f"{x.shape[2]}"
                )
        _check_layers(module, properties.get("sliding_window"))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        kind = q.device.type
        if torch.is_autocast_enabled(kind):
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        named = {self.properties[name]: value for name, value in properties.items()}
        return packed_attention(q, k, v, self.layout, scale, **named)[0][None]


def _ids(tokens: Sequence[int] | torch.Tensor) -> Sequence[int]:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens


def _check_layers(module: Any, window: int | None) -> None:
    """Raises ValueError for a model whose rows affect each other outside of its attention.

    Also for a window that only a mask has, which is not passed to the attention.
    """
    if getattr(module, "is_causal", True) is False:
        raise ValueError(
            "is_causal must be True to train on packed samples, got False in "
            f"{type(module).__name__}: its rows attend to later ones"
        )
    kinds = getattr(module.config, "layer_types", None) or []
    other = sorted({*kinds} - {*ATTENTION})
    if other:
        raise ValueError(
            f"layer_types must be {' or '.join(ATTENTION)} to train on packed samples, got "
            f"{other[0]!r} in {type(module).__name__}: such a layer would carry one sample over to "
            "the next"
        )
    if _is_stateful(type(module).__module__):
        raise ValueError(
            f"the family of {type(module).__name__} must have no layers with a state to train on "
            "packed samples: they would carry one sample over to the next"
        )
    if kinds and kinds[module.layer_idx] == "sliding_attention" and window is None:
        raise ValueError(
            "sliding_window must be passed to the attention of a layer with a window, got None in "
            f"{type(module).__name__}: csd_tree does not support this family"
        )


@cache
def _is_stateful(file: str) -> bool:
    """True if a model of the module `file` has states, by transformers' own mark."""
    return any(getattr(x, "_is_stateful", False) is True for x in vars(sys.modules[file]).values())
