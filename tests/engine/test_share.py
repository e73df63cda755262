"""Samples of a call's other prompts draft on request, with low weight, and change no token."""

import pytest
import torch
from checkpoints import build
from engine_cases import PROMPTS, assert_same_samples
from scripted import counting, engine
from targets import few

import csd
from csd.engine import cross_prompt_history
from csd.engine.cross_prompt_history import CrossPromptHistory, max_graph_tokens
from csd.engine.requests import Request
from csd.engine.result import Sample
from csd.engine.sampling import SamplingParams
from csd.graph.consensus import ConsensusGraph
from csd.graph.history import OTHER_PROMPT_CONTEXT, PastSample, history_rows
from csd.kernels.ops import reference
from csd.state.context_table import ANY, HISTORY_BIT, WEIGHT_ONE, GraphConfig
from csd.state.slots import Slots

OPTIONS = dict(num_samples=4, max_new_tokens=24, seed=3, temperature=0.9)
MANY = [PROMPTS[0], PROMPTS[1], PROMPTS[0][:-1], PROMPTS[1][1:], PROMPTS[0]]


@pytest.fixture(scope="module")
def model():
    made = build("llama", dtype=torch.float64)
    made.generation_config.eos_token_id = None
    return made


@few(4)
@pytest.mark.parametrize("budget", [0, 5, 40])
@pytest.mark.parametrize("together", [None, 1, 4])
def test_tokens_equal_those_without_share(model, budget, together):
    plain = csd.Engine(model).generate(MANY, speculate=False, **OPTIONS)
    e = csd.Engine(model, max_slots=3, together=together)
    out = e.generate(MANY, share="call", budget=budget, **OPTIONS)
    assert_same_samples(out, plain)
    assert out[0].stats.shared_tokens == 0
    assert all(o.stats.shared_tokens > 0 for o in out[3:])


@pytest.mark.parametrize("lag", [0, 2])
def test_static_steps_and_lag_draw_the_same(model, lag):
    plain = csd.Engine(model).generate(MANY, speculate=False, **OPTIONS)
    for static in (False, True):
        e = csd.Engine(model, static=static, lag=lag, max_slots=2)
        assert_same_samples(e.generate(MANY, share="call", budget=16, **OPTIONS), plain)


def test_together_with_history(model):
    e = csd.Engine(model, max_slots=3)
    first = e.generate(MANY, **OPTIONS)
    again = e.generate(MANY, share="call", history=first, budget=16, **OPTIONS)
    assert_same_samples(again, first)
    own = [sum(map(len, o.tokens)) for o in first]
    assert [o.stats.history_tokens for o in again] == own
    assert sum(o.stats.shared_tokens for o in again) > 0


def test_prompts_draft_from_other_prompts_only_with_share():
    """The second prompt shares one token with the first prompt's sample."""
    e = engine(counting(16), max_slots=1)
    prompts = [[0], [9, 3]]
    shared = e.generate(prompts, share="call", max_new_tokens=8, budget=16)
    alone = e.generate(prompts, max_new_tokens=8, budget=16)
    assert shared[1].tokens == alone[1].tokens == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert shared[1].stats.accepted["history"] > 0
    assert shared[1].stats.steps < alone[1].stats.steps
    assert shared[0].stats.accepted["history"] == 0 and shared[0].stats.shared_tokens == 0
    assert shared[1].stats.shared_tokens == 8
    assert alone[1].stats.accepted["history"] == 0 and alone[1].stats.shared_tokens == 0


def test_samples_are_dropped_at_the_end_of_a_call():
    e = engine(counting(16), max_slots=1)
    e.generate([[0], [1]], share="call", max_new_tokens=8, budget=16)
    out = e.generate([9, 3], share="call", max_new_tokens=8, budget=16)
    assert out.stats.shared_tokens == 0 and out.stats.accepted["history"] == 0


def test_prompts_admitted_at_the_start_receive_no_samples():
    e = engine(counting(16), max_slots=2)
    out = e.generate([[0], [9, 3]], share="call", max_new_tokens=8, budget=16)
    assert [o.stats.shared_tokens for o in out] == [0, 0]


def request(index):
    return Request.of(index, [1], SamplingParams(max_new_tokens=9), range(1), 0)


def sample(tokens):
    return Sample(0, None, tokens, [], [], "stop")


def test_one_sample_of_each_other_prompt_newest_first(monkeypatch):
    monkeypatch.setattr(cross_prompt_history, "MAX_TOKENS", 10)
    history = CrossPromptHistory()
    for index, tokens in [(0, [1] * 4), (1, [2] * 3), (1, [3] * 3), (2, [4] * 3), (3, [5] * 40)]:
        history.add(request(index), sample(tokens))

    def received(index):
        return [e.tokens.tolist() for e in history.samples_for(request(index))]

    # a long one fills the room, and what comes before it has none
    assert received(0) == [[5] * 10]
    assert received(3) == [[4] * 3, [2] * 3, [1] * 4]
    assert all(e.other_prompt and e.age == 2 for e in history.samples_for(request(3)))


def test_memory_is_bounded_by_what_one_prompt_may_receive(monkeypatch):
    monkeypatch.setattr(cross_prompt_history, "MAX_TOKENS", 10)
    history, added = CrossPromptHistory(), []
    for index in range(50):
        tokens = [index] * (3 + index % 8)
        history.add(request(index), sample(tokens))
        added.append(tokens)
        # reference: every sample is stored
        for asked in (index, index - 1, 99):
            expected, room = [], 10
            for i in reversed(range(index + 1)):
                if i != asked:
                    if len(added[i]) > room:
                        break
                    expected.append(added[i])
                    room -= len(added[i])
            assert [e.tokens.tolist() for e in history.samples_for(request(asked))] == expected
    assert len(history._samples) <= 2 * 10
    # one that was dropped does not come back
    history.add(request(0), sample([7, 7]))
    assert [7, 7] not in [e.tokens.tolist() for e in history.samples_for(request(99))]


def test_other_prompts_enter_short_contexts_at_a_quarter_of_the_weight():
    config, y = GraphConfig(), [5, 6, 7, 8]
    rows = history_rows([1, 2, 3], PastSample.of(y, age=2, other_prompt=True), config)
    assert rows.token[:4, 0].tolist() == y and set(rows.total[:4]) == {WEIGHT_ONE // 4}
    # no context reaches into the receiving prompt
    assert rows.context[:4, :OTHER_PROMPT_CONTEXT].tolist() == [[-1, -1], [5, -1], [6, 5], [7, 6]]
    assert (rows.context[:4, OTHER_PROMPT_CONTEXT:] == -1).all()
    assert rows.context[4, 0] == ANY and rows.total[4] == len(y) * WEIGHT_ONE // 4

    graph, slots = ConsensusGraph(reference(), "cpu"), Slots.empty(1, 1, 8, config.context)
    slots.group_key[0] = 7
    for _ in graph.enter_history(7, [1, 2, 3], [PastSample.of(y, age=2, other_prompt=True)], slots):
        pass
    table = graph.table
    used = table.entry_group == 7
    order = (table.entry_tokens[used] >= 0).sum(1)
    assert sorted(order.tolist()) == [1, 1, 1, 1, 2, 2]
    bit = table.succ_source[used][table.succ_token[used] >= 0] >> HISTORY_BIT & 1
    assert bit.all()


def test_the_table_has_room_for_it():
    jobs = [request(i) for i in range(3)]
    assert max_graph_tokens(jobs, 2) == 2 * (9 * 2) // 2
    long = [Request.of(i, [1], SamplingParams(max_new_tokens=9000), range(1), 0) for i in range(3)]
    assert max_graph_tokens(long, 64) == 64 * cross_prompt_history.MAX_TOKENS // 2
    assert max_graph_tokens(jobs[:1], 1) == 0


@pytest.mark.parametrize("verifier", ["canonical", "recursive", "kseq"])
def test_verifiers_that_draw_their_drafts_refuse_it(model, verifier):
    with pytest.raises(ValueError, match=f"share needs verifier='match'.*{verifier}"):
        csd.generate(model, MANY, share="call", verifier=verifier, **OPTIONS)


@pytest.mark.parametrize("value", ["engine", True, ""])
def test_other_values_are_refused(model, value):
    with pytest.raises(ValueError, match="share must be None or 'call', got"):
        csd.generate(model, MANY, share=value)


def test_drafters_that_take_none_refuse_it(model):
    e = csd.Engine(model)
    with pytest.raises(ValueError, match="share needs drafter='consensus', got"):
        e.generate(MANY, share="call", drafter="prompt-lookup")
    assert len(e.generate(MANY[0], max_new_tokens=2)[0].tokens) == 2


def test_without_drafts_nothing_enters(model):
    out = csd.Engine(model, max_slots=2).generate(MANY, share="call", speculate=False, **OPTIONS)
    assert all(o.stats.shared_tokens == o.stats.nodes_proposed == 0 for o in out)
