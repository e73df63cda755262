"""Slots are as many as fit; a request that cannot fit is refused with the numbers."""

import pytest
import torch
from scripted import PrefixSum, engine

import csd
from csd import engine as engine_file
from csd.cache import PageAllocator
from csd.memory import free_bytes, slots_that_fit

# Llama-3.1-8B in bfloat16: 32 layers, 8 KV heads of 128, pages of 64 tokens
PAGE_BYTES = 2 * 32 * 64 * 8 * 128 * 2
ROOM = int(0.9 * (80e9 - 16.06e9))


def fit(wanted, new_tokens, prompt=1024, room=ROOM):
    return slots_that_fit(
        wanted=wanted, groups=1, slot_pages=-(-new_tokens // 64), prompt_pages=prompt // 64,
        page_bytes=PAGE_BYTES, room=room,
    )  # fmt: skip


def test_an_8b_model_on_80_gb():
    assert fit(256, 1024) == 256
    assert fit(256, 2048) < 256


def test_every_slot_counts_with_its_groups_prompt():
    options = dict(slot_pages=2, prompt_pages=3, page_bytes=10)
    assert slots_that_fit(wanted=9, groups=9, room=200, **options) == 4
    assert slots_that_fit(wanted=9, groups=1, room=200, **options) == 8


def test_what_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(MemoryError, match=r"needs 136 MiB .*16 pages.*1 for new.*95 MiB may"):
        fit(4, 64, room=100_000_000)


def test_an_engine_short_of_memory_takes_fewer_slots(monkeypatch):
    model = PrefixSum(sharpness=4.0)
    options = dict(num_samples=6, max_new_tokens=40, seed=3)
    expected = csd.generate(engine(model), [1, 2], **options)
    # three pages: the prompt's and two slots'
    monkeypatch.setattr(engine_file, "free_bytes", lambda device: 4 * 2048)
    short = engine(model)
    assert csd.generate(short, [1, 2], **options).tokens == expected.tokens
    assert short._step.slots.count == 2


def test_free_memory_is_read():
    assert free_bytes(torch.device("cpu")) > 2**20


def test_pages_are_neighbours_where_they_can_be():
    pages = PageAllocator(8)
    a, b = pages.take(3), pages.take(2)
    pages.give_back(a)
    assert pages.take(2) == [0, 1]
    assert pages.take(3) == [5, 6, 7]
    pages.give_back(b)
    assert pages.take(3) == [2, 3, 4]
    with pytest.raises(MemoryError, match="1 pages asked for, 0 are free"):
        pages.take(1)
