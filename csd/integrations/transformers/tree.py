"""Draft trees of many samples of several prompts, for one forward pass of a `transformers` model.

    cache = csd.TreeCache([model(prompt[:, :-1]).past_key_values], samples=[4], max_new_tokens=256)
    tree = cache.tree(tokens, parents)                  # per sample, the root first
    logits = model(**tree.inputs).logits[0]             # [M, V], sample after sample
    cache.commit(tree, tree.accepted(logits.argmax(-1)))

A prompt's keys and values are stored once for all its samples, in pages of 64 tokens; each sample
commits to its own pages; those of the nodes are scratch memory of the tree. A root is the last
token of its sample (at first the prompt's last), whose keys and values are not cached yet.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from csd.kernels.attention import (
    TreeLayout,
    next_layer_attention,
    tree_attention,
    tree_attention_ref,
    tree_attention_triton,
)
from csd.kernels.attention.layout import Work, check_layout
from csd.state.kv_cache import PAGE
from csd.state.record import check_tensor

MASK = (1 << 64) - 1


def _by_loops(*args: Any, scale: float, work: None = None) -> torch.Tensor:
    from csd.kernels.cpu_ops import tree_attention

    return tree_attention(*args[:5], **args[5]._asdict(), scale=scale)


def _by_reference(*args: Any, scale: float, work: None = None) -> torch.Tensor:
    return tree_attention_ref(*args[:5], **args[5]._asdict(), scale=scale)


_ATTENTION: dict[str | None, Callable[..., torch.Tensor]] = {
    None: tree_attention,
    "reference": _by_reference,
    "cpu": _by_loops,
    "triton": tree_attention_triton,
}


@dataclass(slots=True, eq=False)
class Tree:
    """One step's trees: M rows, S slots (samples), G groups (prompts), L layers.

    Rows are ordered by group, then slot, a parent before its children, at most 64 rows per slot;
    padding rows come last with slot -1 and give zeros. All tensors may be on the device and be
    changed in place between forward passes.
    """

    ancestors: torch.Tensor  # [M] int64, bit j: the slot's row j is this row or above it
    slot: torch.Tensor  # [M] int32, -1 in padding
    slot_start: torch.Tensor  # [S] int32, first row of the slot
    slot_nodes: torch.Tensor  # [S] int32, rows of the slot
    group_start: torch.Tensor  # [G + 1] int32, row ranges of the groups
    prompt_pages: torch.Tensor  # [G, PP] int32, -1 where there is no page
    prompt_len: torch.Tensor  # [G] int32, tokens
    slot_pages: torch.Tensor  # [S, SP] int32
    slot_len: torch.Tensor  # [S] int32, committed tokens
    k_pages: torch.Tensor  # [L, pages, 64, K, D]
    v_pages: torch.Tensor  # [L, pages, 64, K, D]
    node_k: torch.Tensor  # [L, M, K, D], written by the forward pass
    node_v: torch.Tensor  # [L, M, K, D], written by the forward pass
    token: torch.Tensor  # [M] int64
    position: torch.Tensor  # [M] int64, index in the sample's sequence, prompt included
    # a backend of `csd.kernels.backends`; None takes the one that fits the device and the dtype
    kernels: str | None = None
    _work: Work | None = field(default=None, repr=False)
    _attended: int = field(default=0, repr=False)  # layers since `inputs` was read

    def __post_init__(self) -> None:
        kind, device = self.node_k.dtype, self.node_k.device
        check_tensor("node_k", self.node_k, (None,) * 4, None, device)
        L, M, K, D = self.node_k.shape
        check_tensor("node_v", self.node_v, (L, M, K, D), kind, device)
        check_tensor("k_pages", self.k_pages, (L, None, PAGE, K, D), kind, device, rows_apart=True)
        check_tensor("v_pages", self.v_pages, self.k_pages.shape, kind, device, rows_apart=True)
        check_layout(self.layout, M, device)
        for name in ("token", "position"):
            check_tensor(name, getattr(self, name), (M,), torch.int64, device)
        if self.kernels not in _ATTENTION:
            raise ValueError(
                f"kernels must be 'reference', 'cpu' or 'triton', got {self.kernels!r}"
            )

    @property
    def layout(self) -> TreeLayout:
        """Layout of the keys of every row, for attention."""
        return TreeLayout(*(getattr(self, name) for name in TreeLayout._fields))

    @property
    def inputs(self) -> dict:
        """Arguments of the model's forward call; logits are [1, M, V], row by row."""
        self._attended = 0
        # models pass a mask of four dimensions on unchanged and build none
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.token.device)
        return {
            "input_ids": self.token[None],
            "position_ids": self.position[None],
            "attention_mask": mask,
            "tree": self,
            "use_cache": False,
        }

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of one layer: query [1, H, M, D], the rows' own key and value [1, K, M, D].

        Copies key and value to `node_k` and `node_v`, which `TreeCache.commit` reads. Returns
        [1, M, H, D].
        """
        _, M, K, D = self.node_k.shape
        if query.shape[0] != 1 or query.shape[2] != M:
            raise ValueError(
                f"input_ids must be one row of the tree's {M} tokens, got {query.shape[0]} of "
                f"{query.shape[2]}"
            )
        if key.shape != (1, K, M, D):
            raise ValueError(
                f"keys must have shape {(1, K, M, D)}, got {tuple(key.shape)}: do not pass "
                "past_key_values, since the tree has the cache"
            )
        if value.shape != key.shape:
            raise ValueError(
                f"values must have the shape of the keys, {tuple(key.shape)}, got "
                f"{tuple(value.shape)}"
            )
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
            raise RuntimeError(
                "tree attention over a cache has no backward: call the model under "
                "torch.no_grad(), or train on a csd.PackedTree"
            )
        self.node_k[layer].copy_(key[0].transpose(0, 1))
        self.node_v[layer].copy_(value[0].transpose(0, 1))
        # rows of q may be strided, but the heads of a row must be contiguous
        q = query[0].transpose(0, 1).contiguous()
        planned = self.kernels == "triton" or (self.kernels is None and q.is_cuda)
        if planned and (layer == 0 or self._work is None):
            from csd.kernels.attention.triton.plan import plan_attention

            self._work = plan_attention(self.layout, q.shape[1], K)
        attention = _ATTENTION[self.kernels]
        if self.kernels is None and layer > 0:
            # the first layer has checked the layout, which all layers share
            attention = next_layer_attention
        return attention(
            q,
            self.node_k[layer],
            self.node_v[layer],
            self.k_pages[layer],
            self.v_pages[layer],
            self.layout,
            scale=scale,
            work=self._work if planned else None,
        )[None]

    def count(self, layer: int) -> None:
        """Raises ValueError unless the layers of a pass attend once each, in order."""
        if layer != self._attended:
            raise ValueError(
                f"a forward pass must call attention once in each of {self.node_k.shape[0]} "
                f"layers, in order, got layer {layer} instead of {self._attended}: either this "
                "family calls attention more often, which csd_tree does not support, or "
                "tree.inputs was not read again for this pass"
            )
        self._attended += 1

    def check_attended(self) -> None:
        """Raises RuntimeError unless the last pass has attended in every layer."""
        if self._attended != self.node_k.shape[0]:
            raise RuntimeError(
                f"the model must call attention in {self.node_k.shape[0]} layers before a path is "
                f"committed, got {self._attended}: call model(**tree.inputs) first; a family that "
                "drops the argument tree, or has other layers, is not supported"
            )

    def accepted(self, sample: torch.Tensor) -> list[list[int]]:
        """The accepted path of every slot, as indices into its list of nodes, the root first.

        sample: [M], the token drawn at each row from its logits. A row is accepted if it is a root,
        or its parent is accepted and drew this row's token: the tokens drawn at the accepted rows
        are the new tokens, and the last of them is the next root. Copies from the device. Raises
        RuntimeError if the pass has not attended in every layer.
        """
        self.check_attended()
        drawn, token = sample.tolist(), self.token.tolist()
        paths = []
        for start, count in zip(self.slot_start.tolist(), self.slot_nodes.tolist(), strict=True):
            words = self.ancestors[start : start + count].tolist()
            path: list[int] = []
            word = 0
            for j in range(count):
                # ancestors of j are accepted, and the last of them drew j's token
                above = words[j] & ~(1 << j) & MASK
                if above == word and (not path or drawn[start + path[-1]] == token[start + j]):
                    path.append(j)
                    word |= 1 << j
            paths.append(path)
        return paths
