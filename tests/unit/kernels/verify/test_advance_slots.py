"""Moving slots on, interpreted, against the reference."""

from copy import deepcopy
from importlib import import_module

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields
from helpers.kernels.tree_cases import random_logits, trees

from csd.kernels.verify import verify_ref
from csd.kernels.verify.advance_slots import advance_slots, advance_slots_ref, advance_slots_triton

pytestmark = pytest.mark.compiled

module = import_module("csd.kernels.verify.advance_slots")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_equals_the_reference(seed, penalty):
    pool, slots = trees(seed, rows=60)
    slots.repetition_penalty[::2] = penalty
    slots.stop_ids[:, 0] = 1
    # token 31 sits on the sign bit, and tokens of one step share words
    logits = random_logits(pool.rows, 97, seed)
    logits[::3, 31] += 20
    verdict = verify_ref(logits, pool, slots)
    want = deepcopy(slots)
    advance_slots_ref(want, verdict)
    got = deepcopy(slots)
    advance_slots_triton(got, verdict)
    assert_equal_fields(got, want)
    op = deepcopy(slots)
    advance_slots(op, verdict)
    assert_equal_fields(op, want)


def test_several_tokens_are_appended_in_these_tests():
    most = []
    for seed in range(4):
        pool, slots = trees(seed, rows=60)
        slots.stop_ids[:, 0] = 1
        most.append(
            int(verify_ref(random_logits(pool.rows, 97, seed), pool, slots).accept_count.max())
        )
    assert max(most) > 1


def test_operator():
    pool, slots = trees(0)
    verdict = verify_ref(random_logits(pool.rows, 97), pool, slots)
    args = module._advance_slots.pack(slots, verdict)
    torch.library.opcheck(torch.ops.csd.advance_slots.default, tuple(args))


def test_bad_input():
    pool, slots = trees(0)
    verdict = verify_ref(random_logits(pool.rows, 97), pool, slots)
    verdict.accept_row = verdict.accept_row[:3]
    with pytest.raises(ValueError, match=r"accept_row must have shape \(7, 17\), got \(3, 17\)"):
        advance_slots(slots, verdict)
