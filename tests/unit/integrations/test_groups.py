"""Rows of integrations that are drawn as groups, in one part or in several."""

import csd
from csd.engine.options.params import SamplingParams
from csd.integrations.groups import draw_rows, earlier_copies

A, B = [5, 6, 7, 5, 6, 7, 5], [9, 8, 30, 31]
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=12)


def test_parts_of_groups_are_what_the_whole_is(checkpoint):
    """The indices of a row's samples may be given, in any order, and with gaps."""
    rows = [A, A, B, A, B, A]
    assert earlier_copies(rows) == [0, 1, 0, 2, 1, 3]
    with csd.Engine(checkpoint("qwen2"), max_slots=4) as engine:
        whole = draw_rows(engine, rows, PARAMS, seed=3)
        assert [s.index for s in whole] == earlier_copies(rows)
        for places in ([0, 1, 5], [5, 2, 4, 0]):
            part = draw_rows(
                engine,
                [rows[i] for i in places],
                PARAMS,
                seed=3,
                first_sample=[earlier_copies(rows)[i] for i in places],
            )
            assert [s.index for s in part] == [whole[i].index for i in places]
            assert [s.tokens for s in part] == [whole[i].tokens for i in places]
        assert draw_rows(engine, [], PARAMS, seed=3, first_sample=[]) == []


def test_known_samples_draft_and_change_nothing(checkpoint):
    with csd.Engine(checkpoint("qwen2"), max_slots=4) as engine:
        plain = draw_rows(engine, [A], PARAMS, seed=3, budget=16)
        known = draw_rows(engine, [A], PARAMS, seed=3, budget=16, known=[plain])
    assert known[0].tokens == plain[0].tokens
    assert "history" in known[0].sources and "history" not in plain[0].sources
