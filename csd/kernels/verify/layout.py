"""Places of the fields in the two tensors of a snapshot (`snapshot.py`)."""

from math import prod

import torch

from csd.state.pool import Pool
from csd.state.verdict import TOP, Verdict

# name, shape and first element of a field
Places = tuple[tuple[str, tuple[int, ...], int], ...]


def layout(S: int, M: int, A: int, top: bool, trees: bool) -> tuple[Places, Places]:
    """Fields of the int32 and of the float tensor, for S slots, M rows and paths of <= A rows."""
    ints: dict[str, tuple[int, ...]] = {name: (S,) for name in ("count", "nodes", "finish", "bad")}
    ints |= {"tokens": (S, A), "sources": (S, A), "cost": (M,)}
    floats: dict[str, tuple[int, ...]] = {"logprobs": (S, A), "raw_logprobs": (S, A)}
    if top:
        ints["top_token"] = floats["top_prob"] = (S, A, TOP)
    if trees:
        ints["start"] = (S,)
        ints |= {name: (M,) for name in ("token", "parent", "path_cost", "source")}
        ints["accept_row"] = (S, A)
    return _places(ints), _places(floats)


def _places(shapes: dict[str, tuple[int, ...]]) -> Places:
    offset, places = 0, []
    for name, shape in shapes.items():
        places.append((name, shape, offset))
        offset += prod(shape)
    return tuple(places)


def empty_snapshot(
    pool: Pool, verdict: Verdict, top: bool, trees: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates the int32 and the float tensor, uninitialized."""
    S, A = verdict.accept_row.shape
    ends = (places[-1] for places in layout(S, pool.token.shape[0], A, top, trees))
    ints, floats = (offset + prod(shape) for _, shape, offset in ends)
    logprob = verdict.logprob
    return logprob.new_empty(ints, dtype=torch.int32), logprob.new_empty(floats)
