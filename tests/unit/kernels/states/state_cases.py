"""Random texts and trees for operations on states, and the recurrence along each of their paths."""

from dataclasses import dataclass

import torch

from csd.kernels.states.paths import tree_paths
from csd.state.pool import MAX_DEPTH
from csd.state.recurrent import TAIL, checkpoint

NAN = float("nan")


@dataclass
class Trees:
    """S slots of `lengths` committed tokens and `nodes` nodes each; padding rows behind."""

    slot: torch.Tensor
    position: torch.Tensor
    ancestors: torch.Tensor
    slot_start: torch.Tensor
    slot_nodes: torch.Tensor
    paths: list[list[int]]  # of each row, the rows from its root to it

    def where(self):
        path = tree_paths(self.slot, self.ancestors, self.slot_start)
        return self.slot, self.position, path


def trees(lengths, nodes, padding=3, seed=0, chain=False):
    generator = torch.Generator().manual_seed(seed)
    slot, position, ancestors, paths, start = [], [], [], [], []
    for s, (length, count) in enumerate(zip(lengths, nodes, strict=True)):
        start.append(len(slot) if count else 0)
        own = []
        for j in range(count):
            deep = [i for i in range(j) if len(own[i]) <= MAX_DEPTH]
            up = int(torch.randint(len(deep), (1,), generator=generator)) if j else 0
            if j and (chain or j < 6):
                up = len(deep) - 1
            own.append([*(own[deep[up]] if j else []), j])
            slot.append(s)
            position.append(length + len(own[j]) - 1)
            ancestors.append(sum(1 << i for i in own[j]))
            paths.append([start[s] + i for i in own[j]])
    whole = [
        torch.tensor(x, dtype=torch.int32)
        for x in (slot + [-1] * padding, position + [0] * padding, start, list(nodes))
    ]
    word = [x - (1 << 64) if x >= 1 << 63 else x for x in ancestors] + [0] * padding
    return Trees(whole[0], whole[1], torch.tensor(word), whole[2], whole[3], paths)


@dataclass
class StateCase:
    """Inputs of `tree_delta_rule` and `tree_ssm` by name, and what rows give token by token."""

    q: torch.Tensor
    value: torch.Tensor
    strength: torch.Tensor
    node_key: torch.Tensor
    node_decay: torch.Tensor
    node_update: torch.Tensor
    state: torch.Tensor
    key: torch.Tensor
    update: torch.Tensor
    decay: torch.Tensor
    base: torch.Tensor
    trees: Trees
    want: torch.Tensor  # [M, H, Dv]
    want_update: torch.Tensor

    def delta_rule(self, run):
        return run(self.q, self.value, self.strength, *self._rest())

    def ssm(self, run):
        self.node_update.copy_(self.want_update)
        return run(self.q, *self._rest())

    def _rest(self):
        t = self.trees
        return (
            self.node_key,
            self.node_decay,
            self.node_update,
            self.state,
            self.key,
            self.update,
            self.decay,
            self.base,
            *t.where(),
            t.slot_start,
            t.slot_nodes,
        )


def recurrent(state, k, v, d, b, q):
    """One token of a head: the state behind it, its update and its output; b None: v is given."""
    state = d * state
    u = v if b is None else b * (v - k @ state)
    state = state + k[:, None] * u
    return state, u, q @ state


def state_case(
    lengths,
    nodes,
    sizes=(2, 4, 8, 6),
    dtype=torch.float32,
    seed=0,
    solve=True,
    padding=3,
    chain=False,
    texts=None,
):
    """sizes: key heads, heads, key size, value size. What no row may read is NaN."""
    Hk, H, Dk, Dv = sizes
    t = trees(lengths, nodes, padding, seed, chain)
    M, S = t.slot.shape[0], len(lengths)
    generator = torch.Generator().manual_seed(seed + 1 if texts is None else texts)

    def tokens(count):
        def normal(*shape):
            return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

        k = torch.nn.functional.normalize(normal(Hk, Dk), dim=-1)
        # as what is given: numbers of the dtype
        found = k, normal(H, Dv), normal(H).sub(3).exp().add(1).reciprocal(), normal(H).sigmoid()
        return [x.to(dtype).double() for x in (*found, normal(Hk, Dk) * Dk**-0.5)]

    def zeros(*shape, fill=0.0):
        return torch.full(shape, fill, dtype=torch.float64)

    state = zeros(S, H, Dk, Dv)
    tails = [zeros(S, TAIL, *x, fill=NAN) for x in ((Hk, Dk), (H, Dv), (H,))]
    base, ends, each = checkpoint(torch.tensor(lengths, dtype=torch.int32)), [], H // Hk
    for s, length in enumerate(lengths):
        S_h = [zeros(Dk, Dv) for _ in range(H)]
        text = tokens(length)
        for p in range(length):
            if p == base[s]:
                state[s] = torch.stack(S_h)
            k, v, d, b, q = (x[p] for x in text)
            for h in range(H):
                args = k[h // each], v[h], d[h], b[h] if solve else None, q[h // each]
                S_h[h], u, _ = recurrent(S_h[h], *args)
                if p >= base[s]:
                    tails[1][s, p % TAIL, h] = u
            if p >= base[s]:
                tails[0][s, p % TAIL], tails[2][s, p % TAIL] = k, d
        if length == 0:
            state[s] = 0
        ends.append(S_h)
    k, v, d, b, q = tokens(M)
    want, want_update = zeros(M, H, Dv), zeros(M, H, Dv)
    for m, path in enumerate(t.paths):
        for h in range(H):
            S_h = ends[int(t.slot[m])][h]
            for r in path:
                args = k[r, h // each], v[r, h], d[r, h], b[r, h] if solve else None
                S_h, u, o = recurrent(S_h, *args, q[r, h // each])
            want[m, h], want_update[m, h] = o, u
    rows = slice(len(t.paths), None)
    for x in (k, v, d, b, q):
        x[rows] = NAN
    given = (q, v, b, k, d, zeros(M, H, Dv, fill=NAN), state, *tails)
    return StateCase(*(x.to(dtype) for x in given), base, t, want, want_update)
