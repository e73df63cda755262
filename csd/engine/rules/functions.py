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
    rows = _HostRows(forced, pool, slots, owners, teacher_forced)
    for level in rows.levels():
        alike: dict[tuple[int, int], list[int]] = {}
        for row in rows.reached(level, x):
            if not rows.forced[row] >= 0:
                key = id(rows.functions(row)), len(rows.prefixes[row])
                alike.setdefault(key, []).append(row)
        for members in alike.values():
            index = torch.tensor(members, device=x.device)
            ids = torch.tensor([rows.prefixes[row] for row in members], device=x.device)
            x[index] = _run(rows.functions(members[0]), ids, x[index])


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


class _HostRows:
    """Host copy of a pool's rows, with the prefix of each row that a sample can reach."""

    def __init__(
        self,
        forced: torch.Tensor | None,
        pool: Pool,
        slots: Slots,
        owners: Sequence[Request | None],
        teacher_forced: bool,
    ):
        listed = torch.stack([pool.token, pool.parent, pool.slot, pool.depth]).tolist()
        self.token, self.parent, self.slot, self.depth = listed
        self.forced = [-1] * pool.rows if forced is None else forced.tolist()
        self._owners, self._teacher_forced = owners, teacher_forced
        self._stops, self._generated = slots.stop_ids.tolist(), slots.generated.tolist()
        longest = max(self._generated, default=0)
        self._tokens = slots.tokens[:, :longest].tolist()
        # tokens from the start of the prompt up to and including the row's own
        self.prefixes: dict[int, list[int]] = {}

    def functions(self, row: int) -> tuple:
        owner = self._owners[self.slot[row]]
        return () if owner is None else owner.params.logits_processor

    def levels(self) -> list[list[int]]:
        """Rows of slots that have functions, one list per depth."""
        levels: list[list[int]] = []
        for row, s in enumerate(self.slot):
            if s >= 0 and self.functions(row):
                levels += [[] for _ in range(self.depth[row] + 1 - len(levels))]
                levels[self.depth[row]].append(row)
        return levels

    def reached(self, level: list[int], x: torch.Tensor) -> list[int]:
        """Rows of a level that a sample can reach, in order; stores their prefixes."""
        below = [row for row in level if self.depth[row] > 0 and self._goes_on(row)]
        if below:
            parents = torch.tensor([self.parent[row] for row in below], device=x.device)
            tokens = torch.tensor([self.token[row] for row in below], device=x.device)
            scores = x[parents, tokens].tolist()
        reached = []
        for row in level:
            if self.depth[row] == 0:
                s = self.slot[row]
                owner = self._owners[s]
                assert owner is not None
                self.prefixes[row] = owner.prompt + self._tokens[s][: self._generated[s]]
                reached.append(row)
        for i, row in enumerate(below):
            only = self.forced[self.parent[row]]
            drawn = self.token[row] == only if only >= 0 else scores[i] != -torch.inf
            if drawn or self._teacher_forced:
                self.prefixes[row] = [*self.prefixes[self.parent[row]], self.token[row]]
                reached.append(row)
        return sorted(reached)

    def _goes_on(self, row: int) -> bool:
        ended = not self._teacher_forced and self.token[row] in self._stops[self.slot[row]]
        return self.parent[row] in self.prefixes and not ended
