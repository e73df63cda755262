"""Rows of one differentiable pass: each prompt once, then the trie of its completions.

A prompt's rows come first, then the trie's in depth-first order, so the rows below a row are one
run, and rows of a completion that no earlier one has are one run too. Row i attends to row j if
j <= i < end[j]. A completion's last token has no row, since no token is scored after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class OwnRows(NamedTuple):
    """Rows that one completion of a group was the first to need; `above` are those before them."""

    group: int
    start: int
    stop: int
    above: list[int]  # rows from the prompt's last token to the row before `start`


class Group(NamedTuple):
    """Rows of one prompt and its completions."""

    start: int
    prompt: int  # tokens of the prompt
    stop: int


@dataclass(slots=True)
class Rows:
    """R rows; T scored tokens, completion after completion."""

    token: torch.Tensor  # [R] int32
    position: torch.Tensor  # [R] int32
    end: torch.Tensor  # [R] int32, the first row after those below the row
    groups: list[Group]
    runs: list[OwnRows]
    row: torch.Tensor  # [T] int64, the row whose logits score the token
    target: torch.Tensor  # [T] int64
    prompts: Sequence[list[int]] = field(repr=False)
    completions: Sequence[Sequence[list[int]]] = field(repr=False)
    # [T]: group, completion of the group, and index in the completion
    origin: list[tuple[int, int, int]] = field(repr=False)
    unshared: int  # rows of passes over each completion with its prompt

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        completions: Sequence[Sequence[list[int]]],
        device: str | torch.device,
    ) -> "Rows":
        """Rows of prompts [G], and of each one's completions, none of them empty."""
        token, position, end, row, target = (list[int]() for _ in range(5))
        groups, runs, origin = list[Group](), list[OwnRows](), list[tuple[int, int, int]]()
        unshared = 0
        for g, (prompt, own) in enumerate(zip(prompts, completions, strict=True)):
            start = len(token)
            token += prompt
            position += range(len(prompt))
            paths = _paths(own, len(token), len(prompt), token, position)
            stop = len(token)
            groups.append(Group(start, len(prompt), stop))
            end += _ends(position[start:], start)
            earlier: set[int] = set()
            for n, (tokens, path) in enumerate(zip(own, paths, strict=True)):
                fresh = [r for r in path if r not in earlier]
                if fresh:
                    runs.append(OwnRows(g, fresh[0], fresh[-1] + 1, path[: len(path) - len(fresh)]))
                    earlier.update(fresh)
                row += path
                target += tokens
                origin += [(g, n, i) for i in range(len(tokens))]
                unshared += len(prompt) + len(tokens)
        of_token, of_position, of_end = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (token, position, end)
        )
        return cls(
            of_token,
            of_position,
            of_end,
            groups,
            sorted(runs, key=lambda run: run.start),
            torch.tensor(row, device=device),
            torch.tensor(target, device=device),
            prompts,
            completions,
            origin,
            unshared,
        )

    @property
    def count(self) -> int:
        return self.token.shape[0]


def _paths(
    completions: Sequence[list[int]],
    first: int,
    prompt: int,
    token: list[int],
    position: list[int],
) -> list[list[int]]:
    """Rows that score each completion's tokens; appends token and position of the trie's rows.

    first: row after the prompt's `prompt` rows.
    """
    children: list[dict[int, int]] = [{}]
    tokens, depths = [-1], [0]
    nodes: list[list[int]] = []
    for completion in completions:
        node, path = 0, [0]
        for t in completion[:-1]:
            if t not in children[node]:
                children[node][t] = len(children)
                children.append({})
                tokens.append(t)
                depths.append(depths[node] + 1)
            node = children[node][t]
            path.append(node)
        nodes.append(path)
    # depth first: children in the order in which completions brought them
    row_of = [first - 1] * len(children)
    waiting = [*reversed(children[0].values())]
    while waiting:
        node = waiting.pop()
        row_of[node] = len(token)
        token.append(tokens[node])
        position.append(prompt - 1 + depths[node])
        waiting += reversed(children[node].values())
    return [[row_of[node] for node in path] for path in nodes]


def _ends(position: list[int], start: int) -> list[int]:
    """First row after those below each row, of a group's positions in depth-first order."""
    stop = start + len(position)
    end, open_rows = [stop] * len(position), list[int]()
    for i, at in enumerate(position):
        while open_rows and position[open_rows[-1]] >= at:
            end[open_rows.pop()] = start + i
        open_rows.append(i)
    return end
