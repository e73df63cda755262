"""Rows of a text have the same bits wherever steps ended and whatever they held.

One text is walked by steps of several sizes, in a slot among others that hold other texts, with
drafts that are not kept.
"""

import pytest
import torch
from helpers.checks.host_reads import NoHostReads
from helpers.targets import few, slow
from state_cases import trees

from csd.kernels import states as layer_states
from csd.kernels.backends import loops
from csd.kernels.common.cpu import compiles
from csd.kernels.ops import reference, triton
from csd.kernels.states import SSM, DeltaRule, StepStates, commit_states
from csd.state.recurrent import CHUNK, ConvSize, StateMemory, StateSize, StateSizes

pytestmark = pytest.mark.compiled

HK, H, D, C, TEXT = 1, 2, 16, 12, 52
SIZES = StateSizes((ConvSize(C, 4),), (StateSize(HK, H, D, D),))
BACKENDS = {"reference": reference, "triton": triton} | ({"cpu": loops} if compiles() else {})
# accepted tokens a step, slots, seed of all else
WALKS = [[17, 17, 17, 1], [5, 1, 16, 2, 17, 3, 8], [16, 16, 16, 4]]


def numbers(rows, generator):
    def normal(*shape):
        return torch.randn(rows, *shape, generator=generator)

    return dict(
        q=normal(HK, D),
        k=normal(HK, D),
        v=normal(H, D),
        log_decay=-0.1 * normal(H).abs(),
        strength=normal(H).sigmoid(),
        x=normal(C),
    )


def tree_of(kept, drafts, length, others, generator):
    """Slots of 1 to 12 random nodes; in the last one a chain of `kept`, and drafts at its nodes."""
    nodes = torch.randint(1, 12, (len(others),), generator=generator).tolist()
    seed = int(torch.randint(1 << 20, (1,), generator=generator))
    t = trees([*others, length], [*nodes, kept + drafts], padding=2, seed=seed)
    first = int(t.slot_start[-1])
    for j in range(kept + drafts):
        up = j if j < kept else 1 + int(torch.randint(min(kept, 16), (1,), generator=generator))
        path = [*range(up), j]
        t.ancestors[first + j] = sum(1 << i for i in path)
        t.position[first + j] = length + len(path) - 1
    return t


def walk(ops, steps, slots, seed, ssm=False):
    """Outputs of all of the text's rows."""
    text = numbers(TEXT, torch.Generator().manual_seed(0))
    fixed = torch.Generator().manual_seed(1)
    weight, bias, A = (torch.randn(*s, generator=fixed) for s in ((C, 4), (C,), (H,)))
    generator = torch.Generator().manual_seed(seed)
    memory = StateMemory(SIZES, slots, 96, torch.float32, "cpu")
    length, found = torch.zeros(slots, dtype=torch.int32), []
    for kept in steps:
        at = int(length[-1])
        drafts = int(torch.randint(0, 9, (1,), generator=generator)) * (slots > 1)
        t = tree_of(kept, drafts, at, length[:-1].tolist(), generator)
        given, first = numbers(t.slot.shape[0], generator), int(t.slot_start[-1])
        for name, x in given.items():
            x[first : first + kept] = text[name][at : at + kept]
        states = StepStates.of(ops, memory, t)
        y = states.convolve(0, given.pop("x"), weight, bias, True)
        call = DeltaRule(**given, normalize=True)
        if ssm:
            call = SSM(given["v"], given["strength"], -A.abs(), given["k"], given["q"])
        o = states.update(0, call)
        rows = slice(first, first + kept)
        found.append(torch.cat((y[rows], o[rows].flatten(1)), 1))
        # of the others each keeps its root
        accept_row = torch.full((slots, 17), -1, dtype=torch.int32)
        accept_row[:, 0] = t.slot_start
        accept_row[-1, :kept] = torch.arange(first, first + kept, dtype=torch.int32)
        count = torch.ones(slots, dtype=torch.int32)
        count[-1] = kept
        length += count
        commit_states(ops, memory, length, accept_row, count)
    return torch.cat(found)


@few(3)
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("ssm", [False, True], ids=["delta", "ssm"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_has_the_same_bits_in_every_walk(name, ssm):
    ops = BACKENDS[name]()
    # interpreted, a launch takes as long as a hundred rows
    want = walk(ops, [1] * TEXT if name != "triton" else [13] * 4, 1, 1, ssm)
    for i, steps in enumerate(WALKS[:1] if name == "triton" else WALKS):
        assert torch.equal(walk(ops, steps, 1 + i, 2 + i, ssm)[: sum(steps)], want[: sum(steps)])


@slow
@pytest.mark.parametrize("name", BACKENDS)
def test_bits_differ_where_states_move_on_as_soon_as_they_can(name, monkeypatch):
    """The numbers are right, and a row's depend on where the step before it ended."""
    ops, steps = BACKENDS[name](), [5] * 9
    want = walk(ops, steps, 2, 3)

    def early(length):
        # whole chunks before a step of five tokens
        return (length - 5).clamp(min=0) // CHUNK * CHUNK

    monkeypatch.setattr(layer_states, "checkpoint", early)
    got = walk(ops, steps, 2, 3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(got, want)


@pytest.mark.parametrize("ssm", [False, True], ids=["delta", "ssm"])
def test_a_step_reads_nothing_on_the_host(ssm):
    generator = torch.Generator().manual_seed(0)
    memory, t = StateMemory(SIZES, 3, 96, torch.float32, "cpu"), trees([0, 4, 40], [9, 0, 20])
    given = numbers(t.slot.shape[0], generator)
    x, call = given.pop("x"), DeltaRule(**given, normalize=True)
    if ssm:
        call = SSM(call.v, call.strength, -torch.rand(H), call.k, call.q)
    count = torch.tensor([2, 0, 1], dtype=torch.int32)
    with NoHostReads() as mode:
        states = StepStates.of(reference(), memory, t)
        states.convolve(0, x, torch.rand(C, 4), None, True)
        states.update(0, call)
        rows = t.slot_start[:, None] + torch.arange(17, dtype=torch.int32)
        commit_states(reference(), memory, count + 40, rows, count)
    assert len(mode.seen) > 100
