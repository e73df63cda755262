"""Host edits of the slots: many at once, and nothing else is touched."""

from copy import deepcopy
from dataclasses import fields

import pytest
import torch
from helpers.checks.equal_fields import assert_equal_fields

from csd.engine.options.params import SamplingParams
from csd.engine.requests.request import Request
from csd.engine.requests.slot_edits import Refill, clear_slot, fill_slots, seen_words
from csd.kernels.verify.advance_slots import mark_seen
from csd.state.slots import MAX_STOP_IDS, Slots

VOCAB, CONTEXT, PAGES = 100, 8, 3


@pytest.fixture
def slots():
    """Five slots full of what other samples left."""
    slots = Slots.empty(5, VOCAB, 16, CONTEXT)
    generator = torch.Generator().manual_seed(0)
    for field in fields(Slots):
        x = getattr(slots, field.name)
        x.copy_(torch.randint(0, 2 if x.dtype == torch.bool else 90, x.shape, generator=generator))
    return slots


def job(prompt, key, group, **params):
    made = Request(0, prompt, SamplingParams(**params), range(9), 3, key)
    made.place.group = group
    return made


def test_each_slot_gets_its_sample(slots):
    pages = torch.full((5, PAGES), 77, dtype=torch.int32)
    before = deepcopy(slots)
    long = job(
        list(range(20)),
        (1 << 63) - 5,
        1,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        max_new_tokens=12,
        min_new_tokens=2,
        end_ids=(7, 9),
    )
    short = job([4], -(1 << 63), 2, temperature=0.0)
    fill_slots(slots, pages, [Refill(3, long, 6, [5, 1]), Refill(0, short, 2, [])])

    assert slots.live.tolist() == [True, *before.live[1:3].tolist(), True, bool(before.live[4])]
    want = {
        "group": (1, 2),
        "key": ((1 << 63) - 5, -(1 << 63)),
        "sample": (6, 2),
        "generated": (0, 0),
        "step": (0, 0),
        "temperature": (0.7, 0.0),
        "top_k": (5, 0),
        "top_p": (0.9, 1.0),
        "min_p": (0.05, 0.0),
        "repetition_penalty": (1.3, 1.0),
        "max_new": (12, 512),
        "min_new": (2, 0),
    }
    for name, (three, zero) in want.items():
        assert (getattr(slots, name)[3], getattr(slots, name)[0]) == (three, zero), name
    assert slots.context[3].tolist() == [19, 18, 17, 16, 15, 14, 13, 12]
    assert slots.context[0].tolist() == [4] + [-1] * 7
    rest = [-1] * (MAX_STOP_IDS - 2)
    assert slots.stop_ids[3].tolist() == slots.ban_ids[3].tolist() == [7, 9, *rest]
    assert slots.stop_ids[0].tolist() == slots.ban_ids[0].tolist() == [-1] * MAX_STOP_IDS
    assert pages.tolist() == [[-1] * 3, [77] * 3, [77] * 3, [5, 1, -1], [77] * 3]

    others = torch.tensor([1, 2, 4])
    for field in fields(Slots):
        assert torch.equal(getattr(slots, field.name)[others], getattr(before, field.name)[others])
    # what the step clears or overwrites itself, and what belongs to groups
    for name in ("tokens", "logprobs", "raw_logprobs", "prompt_len", "group_key"):
        assert torch.equal(getattr(slots, name), getattr(before, name))
    # only a sample with a penalty looks at what it has seen
    assert torch.equal(slots.seen[0], before.seen[0])
    assert torch.equal(slots.seen[3], seen_words(long.prompt, slots.seen.shape[1]))

    after, pages_after = deepcopy(slots), pages.clone()
    fill_slots(slots, pages, [])
    assert_equal_fields(slots, after)
    assert torch.equal(pages, pages_after)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97])
def test_seen_words_are_those_of_a_step(vocab):
    tokens = torch.randint(vocab, (40,), generator=torch.Generator().manual_seed(vocab))
    seen = torch.zeros(1, (vocab + 31) // 32, dtype=torch.int32)
    mark_seen(seen, tokens[None])
    assert torch.equal(seen_words(tokens.tolist(), seen.shape[1]), seen[0])


def test_a_cleared_slot_is_dead_and_free(slots):
    clear_slot(slots, 2)
    assert not slots.live[2] and slots.group[2] == -1 and slots.repetition_penalty[2] == 1
