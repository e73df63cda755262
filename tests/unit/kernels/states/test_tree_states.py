"""The delta rule, Mamba-2 and what carries their states on, against the recurrence by token."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.targets import values
from state_cases import NAN, recurrent, state_case

from csd.kernels.common.cpu import compiles
from csd.kernels.states.advance import advance_state, advance_state_ref, advance_state_triton
from csd.kernels.states.conv import commit_tail, commit_tail_ref, commit_tail_triton
from csd.kernels.states.delta_rule import (
    tree_delta_rule,
    tree_delta_rule_ref,
    tree_delta_rule_triton,
    tree_ssm,
    tree_ssm_ref,
    tree_ssm_triton,
)
from csd.state.recurrent import CHUNK, TAIL

pytestmark = pytest.mark.compiled

RULES = [tree_delta_rule_ref, tree_delta_rule_triton, tree_delta_rule]
MODELS = [tree_ssm_ref, tree_ssm_triton, tree_ssm]
ADVANCES = [advance_state_ref, advance_state_triton, advance_state]
COMMITS = [commit_tail_ref, commit_tail_triton, commit_tail]
if compiles():
    from csd.kernels.states.cpu.advance import advance_state as advance_state_loop
    from csd.kernels.states.cpu.conv import commit_tail as commit_tail_loop
    from csd.kernels.states.cpu.delta_rule import tree_delta_rule as tree_delta_rule_loop
    from csd.kernels.states.cpu.delta_rule import tree_ssm as tree_ssm_loop

    RULES.append(tree_delta_rule_loop)
    MODELS.append(tree_ssm_loop)
    ADVANCES.append(advance_state_loop)
    COMMITS.append(commit_tail_loop)

# committed tokens and nodes of each slot
CASES = {
    "roots": ([0, 1, 16, 17, 32, 33], [1] * 6),
    "beginnings": ([0, 3, 15], [20, 9, 33]),
    "checkpoints pass": ([31, 32, 33, 48], [30, 0, 25, 64]),
    "one slot": ([40], [64]),
    "no slot": ([5, 70], [0, 0]),
}


@cache
def case_of(name, solve):
    return state_case(*CASES[name], solve=solve)


def fresh(name, solve=True):
    """A case of CASES whose outputs are not yet written."""
    case = case_of(name, solve)
    return replace(case, node_update=torch.full_like(case.node_update, NAN))


def close(got, want, dtype):
    """Within 64 roundings of the largest number, a product of 100 being the longest sum."""
    assert got.dtype == dtype
    off = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
    assert off <= 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("run", RULES)
@pytest.mark.parametrize("name", CASES)
def test_delta_rule_is_the_recurrence_along_every_path(name, run):
    case = fresh(name)
    out = case.delta_rule(run)
    close(out, case.want, torch.float32)
    close(case.node_update, case.want_update, torch.float32)
    assert not out[case.trees.slot < 0].any()


@pytest.mark.parametrize("sizes", [(2, 2, 32, 32), (1, 3, 20, 48)])
@pytest.mark.parametrize("run", [RULES[0], *RULES[2:]])
def test_heads_of_other_sizes(run, sizes):
    case = state_case([31, 48], [30, 40], sizes=sizes)
    close(case.delta_rule(run), case.want, torch.float32)


def test_float64_is_the_recurrence():
    case = state_case(*CASES["checkpoints pass"], dtype=torch.float64)
    close(case.delta_rule(tree_delta_rule), case.want, torch.float64)
    with pytest.raises(ValueError, match="state must be float32 or float64 of shape"):
        tree_delta_rule(
            *[
                x.half() if torch.is_tensor(x) and x.is_floating_point() else x
                for x in (case.q, case.value, case.strength, *case._rest())
            ]
        )


@pytest.mark.parametrize("run", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_ssm_is_the_recurrence_along_every_path(name, run):
    case = fresh(name, solve=False)
    close(case.ssm(run), case.want, torch.float32)


# negative controls: each alteration moves outputs far beyond the bound


def another_ancestor(case):
    """A node is given its grandparent as parent."""
    word, start = case.trees.ancestors, int(case.trees.slot_start[0])
    child = next(m for m, path in enumerate(case.trees.paths) if len(path) > 3)
    word[child] &= ~(1 << (case.trees.paths[child][-2] - start))
    case.trees.position[child] -= 1


def no_decay(case):
    case.decay.fill_(1)


def no_decay_of_nodes(case):
    case.node_decay[case.trees.slot >= 0] = 1


def checkpoint_moved(case):
    case.base.sub_(CHUNK)


def checkpoint_later(case):
    case.base.add_(CHUNK)


@values
@pytest.mark.parametrize("run", RULES)
@pytest.mark.parametrize(
    "alter",
    [another_ancestor, no_decay, no_decay_of_nodes, checkpoint_moved, checkpoint_later],
)
def test_what_is_altered_is_seen(run, alter):
    case = state_case([48], [12])
    alter(case)
    out = case.delta_rule(run)
    off = (out.double() - case.want).abs().max() / case.want.abs().max()
    assert not off <= 1e-3


# chunks into the state


def tail_case(lengths, layers=2, sizes=(2, 4, 8, 6), seed=3):
    """Tails of `lengths` tokens behind checkpoint 16 in `layers` layers; NaN behind them."""
    Hk, H, Dk, Dv = sizes
    generator = torch.Generator().manual_seed(seed)
    S = len(lengths)
    state = torch.randn(layers, S, H, Dk, Dv, generator=generator)
    tails = [torch.full((layers, S, TAIL, *x), NAN) for x in ((Hk, Dk), (H, Dv), (H,))]
    for s, length in enumerate(lengths):
        for p in range(CHUNK, CHUNK + length):
            for x in tails:
                x[:, s, p % TAIL] = torch.rand(x[:, s, 0].shape, generator=generator)
    return state, *tails, torch.full((S,), CHUNK, dtype=torch.int32)


@pytest.mark.parametrize("run", ADVANCES)
def test_advance_state(run):
    lengths, chunks = [20, 32, 16, 5], [1, 2, 1, 0]
    state, key, update, decay, base = tail_case(lengths)
    want = state.double()
    for s, count in enumerate(chunks):
        for p in range(CHUNK, CHUNK * (1 + count)):
            for h in range(state.shape[2]):
                for layer in range(2):
                    of = layer, s, p % TAIL
                    want[layer, s, h] = recurrent(
                        want[layer, s, h],
                        key[of][h // 2].double(),
                        update[of][h].double(),
                        decay[of][h].double(),
                        None,
                        key[of][0].double(),
                    )[0]
    run(state, key, update, decay, base, base + CHUNK * torch.tensor(chunks, dtype=torch.int32))
    close(state, want, torch.float32)
    assert torch.equal(base, torch.full_like(base, CHUNK))


@pytest.mark.parametrize("run", ADVANCES)
def test_two_chunks_are_one_after_the_other(run):
    """Bits of a state do not depend on when it was carried on."""
    state, *tails, base = tail_case([32, 32])
    one = state.clone()
    run(state, *tails, base, base + 2 * CHUNK)
    for first in (base, base + CHUNK):
        run(one, *tails, first, first + CHUNK)
    assert torch.equal(one, state)


@pytest.mark.parametrize("run", COMMITS)
@pytest.mark.parametrize("ring", [3, TAIL])
def test_commit_tail(run, ring):
    generator = torch.Generator().manual_seed(1)
    node = torch.randn(2, 40, 5, generator=generator)
    tail = torch.randn(2, 4, ring, 5, generator=generator)
    tail[0, 1] = NAN
    accept_row = torch.full((4, 17), -1, dtype=torch.int32)
    count = torch.tensor([17, 0, 1, 4], dtype=torch.int32)
    for s, n in enumerate(count.tolist()):
        accept_row[s, :n] = torch.randperm(40, generator=generator)[:n]
    slot_len = torch.tensor([17, 9, 33, 64], dtype=torch.int32)
    want = tail.clone()
    for s, n in enumerate(count.tolist()):
        for i in range(n):
            p = int(slot_len[s]) - n + i
            want[:, s, p % ring] = node[:, accept_row[s, i]]
    run(node, tail, slot_len, accept_row, count)
    assert torch.equal(tail.nan_to_num(), want.nan_to_num())
