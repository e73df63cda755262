"""Texts that vLLM's proposer keeps: earlier epochs', long prompts', and those that make place."""

import random

import numpy as np
from vllm_batch import END, PROMPT, Batch, begun, group_of, proposer, samples


def test_a_prompt_that_goes_on_where_a_sample_ended_is_another_group():
    """A conversation's next turn, read later: its prompt begins with the last one's."""
    text = samples(1, 20)[0]
    p = proposer()
    batch = begun(p, {0: (PROMPT, text)})
    batch.run()
    p.propose([], batch.count, batch.ids)
    longer = [*PROMPT, *text, 31, 32, 33]
    batch = begun(p, {0: (longer, text)})
    batch.run()
    assert group_of(p).begun == group_of(p, longer).begun == 1


def test_a_later_epoch_drafts_from_history():
    text = samples(1, 60)[0]
    p = proposer(8, patience=3)
    batch = begun(p, {s: (PROMPT, text) for s in range(2)})
    batch.run()
    first = batch.row_steps
    for _ in range(5):
        p.propose([], batch.count, batch.ids)
    assert not p.rows.groups and not p.rows.samples
    assert [e.tokens.tolist() for e in p.history.of(PROMPT)] == [text, text]
    # groups leave nothing else behind
    assert (p.graph.table.entry_group >= 0).any() and (p._slots.group_key == -1).all()
    batch = begun(p, {s: (PROMPT, text) for s in range(2)})
    batch.run()
    assert batch.row_steps < 0.6 * first

    off = proposer(8, patience=3, history_samples=0)
    assert off.history is None


def test_history_is_bounded():
    p = proposer(patience=1, history_samples=2, history_tokens=100)
    for prompt in range(10):
        batch = begun(p, {s: ([prompt] * 5, samples(1, 20, s)[0]) for s in range(4)})
        batch.run()
    for _ in range(3):
        p.propose([], batch.count, batch.ids)
    assert 0 < p.history.size <= 100
    assert len(p.history.of([9] * 5)) == 2


def test_more_prompts_than_places_release_the_idlest():
    p = proposer(rows=2)
    for prompt in range(10):
        batch = begun(p, {0: ([prompt] * 5, [1, 2, 3, END])}, rows=2)
        batch.run()
    assert len(p.rows.groups) == p.rows.group_slots == 4
    assert [bytes(np.array([n] * 5, np.int32)) in p.rows.groups for n in (5, 6, 9)] == [
        False,
        True,
        True,
    ]
    assert [0] * 5 in p.history


def test_long_prompts_enter_by_pieces():
    """A step waits for few pieces; when all are in, the graph has the whole prompt."""
    draw = random.Random(2)
    prompt = [draw.randrange(1000) for _ in range(9000)]
    text = prompt[5000:5040]
    p = proposer(4, length=9100)
    batch = Batch(p, {0: (prompt, text)}, 8, length=9100)
    batch.put(0, 0)
    batch.step()
    assert p._entering
    for _ in range(3):
        batch.step()
    assert not p._entering
    assert batch.drafts[0] == text[batch.done[0] :][:4]
