"""Paged keys and values that the draft trees of a `transformers` model attend to."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from csd.integrations.transformers.tree import Tree
from csd.kernels.attention.commit_kv import commit_kv, write_prompt
from csd.state.kv_cache import KVCache, pages_for
from csd.state.pool import MAX_NODES
from csd.utils.arguments import check_whole
from csd.utils.device import free_bytes


class TreeCache:
    """Keys and values of prompts and of the committed tokens of their samples.

    prompts: for each prompt, the cache after a forward pass over all but its last token: a
        transformers cache of batch 1 (`DynamicCache`), or a (key, value) pair per layer, each
        [1, K, P, D].
    samples: number of samples of each prompt; slots are numbered prompt after prompt.
    max_new_tokens: most tokens that a sample may commit.
    ids: for each prompt its token ids, the last one included. With them, a cache that already holds
        the last token is refused, and so is a first tree whose root is another token: its
        predictions would be those of a prompt with the last token twice.
    """

    def __init__(
        self,
        prompts: list,
        samples: list[int],
        max_new_tokens: int,
        ids: Sequence[Sequence[int]] | None = None,
    ):
        if len(prompts) != len(samples) or not prompts:
            raise ValueError(
                f"samples must have one number per prompt, got {len(samples)} for {len(prompts)}"
            )
        for n in samples:
            check_whole("samples", n, 1)
        check_whole("max_new_tokens", max_new_tokens, 1)
        stacked = [_stack(prompt, 0) for prompt in prompts]
        first, lengths = stacked[0][0], [k.shape[1] for k, _ in stacked]
        L, _, K, D = first.shape
        for i, (k, _) in enumerate(stacked):
            if (k.shape[0], *k.shape[2:]) != (L, K, D):
                raise ValueError(
                    f"prompts[{i}] must have {L} layers, {K} heads of {D}, got {tuple(k.shape)}"
                )
        S, width = sum(samples), pages_for(max_new_tokens)
        config = SimpleNamespace(layers=L, kv_heads=K, head_dim=D)
        pages = sum(map(pages_for, lengths)) + S * width
        if ids is not None:
            _check_ids(ids, lengths)
        self._roots = None if ids is None else [int(tokens[-1]) for tokens in ids]
        # computed before any is allocated: the pages, their table entries, the slots' numbers
        needed = pages * KVCache.bytes_per_page(config, first.dtype) + S * (4 * width + 64)
        room = free_bytes(first.device)
        if needed > room:
            raise MemoryError(
                f"{S} samples of {max_new_tokens} tokens need {needed / 1000000000.0:.2f} GB, "
                f"{room / 1000000000.0:.2f} GB are free: use fewer samples or tokens"
            )
        self._room = max_new_tokens
        self._group = [g for g, n in enumerate(samples) for _ in range(n)]
        self._prompt_len, self._len = lengths, [0] * S
        self._kv = KVCache(
            config,
            slots=S,
            pages=pages,
            prompt_pages=max(1, *(pages_for(n) for n in lengths)),
            slot_pages=width,
            rows=0,
            dtype=first.dtype,
            device=first.device,
        )
        self.prompt_len = self._int32(lengths)
        self.slot_len = self._int32(self._len)
        for g, (k, v) in enumerate(stacked):
            self._kv.take(self._kv.prompt_pages, g, lengths[g])
            write_prompt(k, v, self._kv.k, self._kv.v, self._kv.prompt_pages[g], 0)
        for s in range(S):
            self._kv.take(self._kv.slot_pages, s, max_new_tokens)

    def __repr__(self) -> str:
        """The numbers of prompts and slots, the tokens of each slot, and the most that one has."""
        return (
            f"<csd.TreeCache of {len(self._prompt_len)} prompts and {len(self._len)} slots, with "
            f"{self._len} of up to {self._room} tokens>"
        )

    def _int32(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._kv.k.device)

    def append(self, slot: int, past: Any, row: int = 0, start: int = 0) -> None:
        """Commit the tokens of a transformers cache from `start` on, of batch row `row`, to a slot.

        For samples begun elsewhere; `start` is the length of the prompt in that cache.
        """
        k, v = (x[:, start:] for x in _stack(past, row))
        self._advance(slot, k.shape[1])
        write_prompt(k, v, self._kv.k, self._kv.v, self._kv.slot_pages[slot], self._len[slot])
        self._len[slot] += k.shape[1]
        self.slot_len.copy_(self._int32(self._len))

    def _advance(self, slot: int, count: int) -> None:
        if self._len[slot] + count > self._room:
            raise ValueError(
                f"slot {slot} has room for {self._room} tokens, got {self._len[slot] + count}"
            )

    def tree(
        self, tokens: list[list[int]], parents: list[list[int]], kernels: str | None = None
    ) -> Tree:
        """Returns the trees of one step.

        tokens, parents: for each slot, the tokens of its nodes and the indices of their parents in
            that list, -1 for the root, which comes first. Empty lists leave the slot out.
        kernels: "reference", "cpu" or "triton"; by default the one that fits the device and the
            dtype.
        """
        S, G = len(self._len), len(self._prompt_len)
        if len(tokens) != S or len(parents) != S:
            raise ValueError(
                f"tokens and parents must have {S} lists, got {len(tokens)} and {len(parents)}"
            )
        if self._roots is not None:
            for s, root in enumerate(self._roots[g] for g in self._group):
                if not self._len[s] and tokens[s] and tokens[s][0] != root:
                    raise ValueError(
                        f"the root of slot {s} must be its prompt's last token, {root}, until "
                        f"tokens are committed, got {tokens[s][0]}"
                    )
        words, depths = zip(*(_words(s, tokens[s], parents[s]) for s in range(S)), strict=True)
        nodes = [len(t) for t in tokens]
        start = [sum(nodes[:s]) for s in range(S)]
        base = [self._prompt_len[self._group[s]] + self._len[s] for s in range(S)]
        bounds = [
            sum(n for n, g in zip(nodes, self._group, strict=True) if g < h) for h in range(G)
        ]
        kv, device = self._kv, self._kv.k.device
        (L, _, _, K, D), M = kv.k.shape, sum(nodes)

        def int64(rows: Iterable[list[int]]) -> torch.Tensor:
            return torch.tensor([x for r in rows for x in r], dtype=torch.int64, device=device)

        return Tree(
            ancestors=int64(words),
            slot=self._int32([s for s in range(S) for _ in tokens[s]]),
            slot_start=self._int32(start),
            slot_nodes=self._int32(nodes),
            group_start=self._int32([*bounds, M]),
            prompt_pages=kv.prompt_pages[:G],
            prompt_len=self.prompt_len,
            slot_pages=kv.slot_pages,
            slot_len=self.slot_len,
            k_pages=kv.k,
            v_pages=kv.v,
            node_k=torch.empty(L, M, K, D, dtype=kv.k.dtype, device=device),
            node_v=torch.empty(L, M, K, D, dtype=kv.k.dtype, device=device),
            token=int64(tokens),
            position=int64([[base[s] + d for d in depths[s]] for s in range(S)]),
            kernels=kernels,
        )

    def commit(self, tree: Tree, paths: list[list[int]]) -> None:
        """Copy keys and values of each slot's accepted path (`Tree.accepted`) to its pages."""
        tree.check_attended()
        start, width = tree.slot_start.tolist(), max(1, *map(len, paths))
        for s, path in enumerate(paths):
            self._advance(s, len(path))
        rows = [[start[s] + j for j in p] + [-1] * (width - len(p)) for s, p in enumerate(paths)]
        kv, counts = self._kv, self._int32([len(p) for p in paths])
        commit_kv(
            tree.node_k,
            tree.node_v,
            kv.k,
            kv.v,
            kv.slot_pages,
            self.slot_len,
            self._int32(rows),
            counts,
        )
        self._len = [n + len(p) for n, p in zip(self._len, paths, strict=True)]
        # in place, since trees refer to this tensor
        self.slot_len += counts


def _stack(past: Any, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one batch row of a transformers cache, each [L, P, K, D]."""
    layers = getattr(past, "layers", None)
    # a subclass stores more than its layers: a recurrent state, an encoder's keys
    if past is None or (layers is not None and type(past).__name__ != "DynamicCache"):
        raise ValueError(
            "a prompt's cache must be a DynamicCache or one (key, value) pair per layer, got a "
            f"{type(past).__name__}"
        )
    for layer in layers or ():
        # other types store recurrent states, a window, or room for later tokens
        if type(layer).__name__ != "DynamicLayer":
            raise ValueError(
                "a cache must have keys and values of all tokens in every layer (DynamicLayer), "
                f"got a {type(layer).__name__}"
            )
    pairs = [(x.keys, x.values) for x in layers] if layers is not None else list(past)
    if not pairs or any(k is None or k.dim() != 4 for k, _ in pairs):
        raise ValueError("a cache must have a key and a value of shape [B, K, P, D] in every layer")
    k, v = (torch.stack([pair[i][row] for pair in pairs]) for i in range(2))
    return k.transpose(1, 2).detach(), v.transpose(1, 2).detach()


def _check_ids(ids: Sequence[Sequence[int]], lengths: list[int]) -> None:
    """Raises ValueError unless each prompt's cache holds all of its tokens but the last."""
    if len(ids) != len(lengths):
        raise ValueError(f"ids must have one list per prompt, got {len(ids)} for {len(lengths)}")
    for i, (tokens, length) in enumerate(zip(ids, lengths, strict=True)):
        if length != len(tokens) - 1:
            raise ValueError(
                f"prompts[{i}] must be the cache of all but the last of its {len(tokens)} tokens, "
                f"got one of {length}: the last token is the root of the first tree"
            )


def _words(slot: int, tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Ancestor bit masks, as int64, and depths of one slot's nodes."""
    if len(tokens) != len(parents) or len(tokens) > MAX_NODES:
        raise ValueError(
            f"slot {slot} must have at most {MAX_NODES} tokens and as many parents, got "
            f"{len(tokens)} and {len(parents)}"
        )
    words: list[int] = []
    for j, p in enumerate(parents):
        if not (p == -1 if j == 0 else 0 <= p < j):
            want = "-1" if j == 0 else f"a node before it, 0 to {j - 1}"
            raise ValueError(f"the parent of node {j} of slot {slot} must be {want}, got {p}")
        words.append((words[p] if j else 0) | 1 << j)
    signed = [w - (1 << 64) if w >> 63 else w for w in words]
    return signed, [w.bit_count() - 1 for w in words]
