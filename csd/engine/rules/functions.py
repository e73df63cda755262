"""Users' functions of token ids and logits, called like transformers' logits processors."""

from collections.abc import Sequence

import torch

from csd.engine.requests.request import Request
from csd.state.pool import Pool
from csd.state.slots import Slots
from csd.utils.check import shown
from csd.utils.torch_state import calling


def apply_functions(
    x: torch.Tensor,
    forced: torch.Tensor | None,
    pool: Pool,
    slots: Slots,
    owners: Sequence[Request | None],
    teacher_forced: bool = False,
) -> None:
    """Apply the functions of the slots' requests to logits x [M, V], in place.

    Rows are processed level by level, so that functions are called only with prefixes that a
    sample can have: not for a row whose token its parent cannot draw, or whose token ends the
    sample. forced: [M], a row's only possible token or -1; rows with such a token are left as they
    are. teacher_forced: True if the tokens are input rather than drawn, so samples continue after
    any token.
    """
    token, parent, slot, depth = torch.stack(
        [pool.token, pool.parent, pool.slot, pool.depth]
    ).tolist()
    only = [-1] * pool.rows if forced is None else forced.tolist()
    stops, generated = slots.stop_ids.tolist(), slots.generated.tolist()
    texts = slots.tokens[:, : max(generated, default=0)].tolist()
    requests = {row: owners[s] for row, s in enumerate(slot) if s >= 0}
    asking = {row: r for row, r in requests.items() if r is not None and r.params.logits_processor}
    # tokens from the start of the prompt up to and including the row's own
    prefixes: dict[int, list[int]] = {}
    levels: list[list[int]] = [[] for _ in range(1 + max(depth, default=0))]
    for row in asking:
        levels[depth[row]].append(row)
    for row in levels[0]:
        prefixes[row] = asking[row].prompt + texts[slot[row]][: generated[slot[row]]]
    for rows in levels:
        # rows below one that a sample can have, and that does not end it
        below = [row for row in rows if parent[row] in prefixes]
        if not teacher_forced:
            below = [row for row in below if token[row] not in stops[slot[row]]]
        if below:
            places = [[parent[row] for row in below], [token[row] for row in below]]
            scores = x[tuple(torch.tensor(places, device=x.device))].tolist()
            for row, score in zip(below, scores, strict=True):
                must = only[parent[row]]
                drawn = token[row] == must if must >= 0 else score != -torch.inf
                if drawn or teacher_forced:
                    prefixes[row] = [*prefixes[parent[row]], token[row]]
        alike: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if row in prefixes and only[row] < 0:
                key = id(asking[row].params.logits_processor), len(prefixes[row])
                alike.setdefault(key, []).append(row)
        for members in alike.values():
            index = torch.tensor(members, device=x.device)
            ids = torch.tensor([prefixes[row] for row in members], device=x.device)
            x[index] = _run(asking[members[0]].params.logits_processor, ids, x[index])


def _run(functions: tuple, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    for function in functions:
        with calling("logits_processor"):
            changed = function(ids, logits)
        if not torch.is_tensor(changed) or changed.shape != logits.shape:
            got = f"shape {list(changed.shape)}" if torch.is_tensor(changed) else shown(changed)
            raise TypeError(
                f"logits_processor must return logits of shape {list(logits.shape)}, got {got}"
            )
        if not changed.is_floating_point():
            raise TypeError(
                f"logits_processor must return floating-point logits, got {changed.dtype}"
            )
        logits = changed.to(logits)
    return logits
