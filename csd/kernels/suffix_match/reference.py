"""Reference in numpy of the matches described in `csd/kernels/suffix_match/`."""

from typing import Any

import numpy as np
import torch

from csd.state.texts import Candidates


def window_distance(text: np.ndarray, query: list[int], edits: int) -> np.ndarray:
    """[T] int: D of the query and the window that ends at each place of `text` [T].

    A value above `edits` means no match: D is larger, the text is too short, or the window has a
    gap (-1). The table is filled for all windows at once, in a band.
    """
    T, k = text.shape[0], len(query)
    if not T:
        return np.zeros(0, int)
    padded = np.concatenate([np.full(k - 1, -1), text])
    # [T, k]: column j is the window's token j
    token = np.lib.stride_tricks.sliding_window_view(padded, k)
    # distance[i, j]: of the query's first i tokens and the window's first j, |i - j| <= edits
    distance = {(0, j): np.full(T, j) for j in range(edits + 1)}
    distance |= {(i, 0): np.full(T, i) for i in range(1, edits + 1)}
    for i in range(1, k + 1):
        for j in range(max(1, i - edits), min(k, i + edits) + 1):
            best = distance[i - 1, j - 1] + (token[:, j - 1] != query[i - 1])
            # deleted from the query, inserted into the window; the last tokens are aligned
            for before in ((i - 1, j), (i, j - 1)):
                if before in distance and not i == j == k:
                    best = np.minimum(best, distance[before] + 1)
            distance[i, j] = best
    return np.where((token >= 0).all(1), distance[k, k], edits + 1)


def match_ends(text: np.ndarray, query: list[int], edits: int) -> np.ndarray:
    """[T] bool: True where a window of `text` [T] within `edits` edits of the query ends."""
    return window_distance(text, query, edits) <= edits


def suffix_match_ref(
    texts: Any,  # csd.state.texts.Texts
    slots: Any,  # csd.state.slots.Slots
    k: int,
    edits: int,
    most: int,
    tokens: int,
) -> Candidates:
    """Returns the candidates of every live slot, filled up with tokens -1 and chances 0."""
    S, device = slots.count, slots.live.device
    names = ("group_key", "sample", "length", "token", "chance")
    key, sample, length, text, chance = (getattr(texts, n).numpy(force=True) for n in names)
    out_token = np.full((S, most, tokens), -1, np.int32)
    out_chance = np.zeros((S, most, tokens), np.int32)
    for s in slots.live.nonzero()[:, 0].tolist():
        query = slots.context[s, :k].tolist()[::-1]
        if min(query) < 0:
            continue
        group = int(slots.group_key[slots.group[s]])
        found = []
        for row in ((key == group) & (sample != int(slots.sample[s]))).nonzero()[0].tolist():
            tokens_of = text[row, : length[row]]
            # at least one token must follow
            distance = window_distance(tokens_of[:-1], query, edits)
            found += [(distance[e], row, e) for e in (distance <= edits).nonzero()[0].tolist()]
        for i, (_, row, end) in enumerate(sorted(found)[:most]):
            stop = min(end + 1 + tokens, length[row])
            out_token[s, i, : stop - end - 1] = text[row, end + 1 : stop]
            out_chance[s, i, : stop - end - 1] = chance[row, end + 1 : stop]
    return Candidates(*(torch.from_numpy(x).to(device) for x in (out_token, out_chance)))
