"""Budgets of thought: what is forced, what is marked, what is counted."""

import pytest
import torch
from helpers.models.scripted import VOCAB, LastToken, Letters, PrefixSum, engine

import csd
from csd.engine.options.thinking import ThinkingBudget, find_tags, spell_tags

# "(" and ")" of this alphabet begin and end a thought
BEGIN, END, STOP = 27, 28, 9


def thinking():
    """A target that thinks for ever, counting through the letters a to h."""

    def logits_of(token, position):
        logits = torch.full((token.shape[0], VOCAB), -50.0, dtype=torch.float64)
        logits[torch.arange(token.shape[0]), (token + 1) % 8] = 50.0
        return logits

    return engine(LastToken(logits_of))


@pytest.mark.parametrize("budget", [0, 16])
@pytest.mark.parametrize("most", [0, 1, 5, 40])
def test_a_thought_ends_when_it_is_spent(most, budget):
    out = csd.generate(
        thinking(),
        [3, BEGIN],
        num_samples=2,
        max_new_tokens=12,
        max_thinking_tokens=most,
        thinking_tags=([BEGIN], [END]),
        budget=budget,
        seed=0,
    )
    free = [(BEGIN + 1 + i) % 8 for i in range(12)]
    want = free[:most] + [END] + [(END + 1 + i) % 8 for i in range(12)]
    for sample in out:
        assert sample.tokens == (free if most > 12 else want[:12])
        assert sample.forced == [i == most for i in range(12)]
        if most < 12:
            assert sample.logprobs[most] == 0
    assert out.stats.thoughts_cut == 2 * (most < 12)
    assert out.to_dict()["forced"] == [s.forced for s in out]


def test_a_long_end_is_forced_to_its_last_token():
    close = [1, 2, 3, END]
    out = csd.generate(
        thinking(),
        [3, BEGIN],
        max_new_tokens=9,
        max_thinking_tokens=2,
        thinking_tags=([BEGIN], [END], close),
        seed=0,
    )
    # the thought counts 4, 5, and goes on with the end's first token
    assert out.tokens == [[4, 5, *close, 5, 6, 7]]
    assert out[0].forced == [False] * 2 + [True] * 4 + [False] * 3


def test_an_end_that_has_begun_goes_on():
    out = csd.generate(
        thinking(),
        [3, BEGIN],
        max_new_tokens=6,
        max_thinking_tokens=3,
        thinking_tags=([BEGIN], [END], [5, 6, END]),
        seed=0,
    )
    assert out.tokens == [[4, 5, 6, END, 5, 6]]
    assert out[0].forced == [False, False, False, True, False, False]


def test_an_end_token_within_the_thought_ends_the_sample():
    out = csd.generate(
        thinking(),
        [3, BEGIN],
        max_new_tokens=9,
        max_thinking_tokens=7,
        thinking_tags=([BEGIN], [END]),
        stop_token_ids=[6],
        seed=0,
    )
    assert out.tokens == [[4, 5, 6]] and out.finish_reasons == ["stop"]
    assert out.stats.thoughts_cut == 0


def test_without_a_thought_nothing_is_forced():
    e, options = engine(PrefixSum()), dict(num_samples=4, max_new_tokens=30, seed=3)
    options |= dict(suppress_tokens=[BEGIN])
    want = csd.generate(e, [1, 2], **options)
    out = csd.generate(e, [1, 2], max_thinking_tokens=0, thinking_tags=([BEGIN], [END]), **options)
    assert out.tokens == want.tokens and not any(map(any, (s.forced for s in out)))
    assert want[0].forced == []


def test_noise_does_not_shift():
    """Behind a forced token the sample goes on as any sample with such a prefix would."""
    model = PrefixSum(sharpness=0.5)
    e = engine(model)
    out = csd.generate(
        e,
        [1, BEGIN],
        num_samples=6,
        max_new_tokens=20,
        max_thinking_tokens=4,
        seed=5,
        thinking_tags=([BEGIN], [END]),
        suppress_tokens=[END],
    )
    free = csd.generate(
        e, [1, BEGIN], num_samples=6, max_new_tokens=4, seed=5, suppress_tokens=[END]
    )
    assert [t[:4] for t in out.tokens] == free.tokens
    assert all(t[4] == END for t in out.tokens)


def test_a_budget_counts_all_thoughts_of_a_sample():
    budget = ThinkingBudget(((1,), (2,), (2,)), 3, [1, 5, 5, 5, 2], False)
    # the prompt's own thought does not count
    for token, forced in ((5, -1), (1, -1), (5, -1), (2, -1), (1, -1), (5, -1), (6, 2)):
        assert budget.forced() == forced
        budget.push(token)


class Thinker(Letters):
    chat_template = "{% if thinking %}<think>{% endif %}..</think>"


def test_tags_of_a_template():
    assert find_tags(Thinker()) == ("<think>", "</think>")
    mistral = Letters()
    mistral.chat_template = {"default": "a", "tools": "[THINK]b[/THINK]"}
    assert find_tags(mistral) == ("[THINK]", "[/THINK]")
    with pytest.raises(ValueError, match="max_thinking_tokens needs the begin and end"):
        find_tags(Letters())
    tags = spell_tags(("ab", "c", "dc"), Letters(), VOCAB)
    assert [tuple(tag) for tag in tags] == [(0, 1), (2,), (3, 2)]
    # one that the tokenizer has no tokens for, and two that have the same
    for tags in (("a", ""), ("", "b"), ("a", (0,))):
        with pytest.raises(ValueError, match="thinking_tags must have a begin and an end of at le"):
            spell_tags(tags, Letters(), VOCAB)


def test_the_example(capsys):
    from importlib.util import find_spec

    from helpers.examples_main import main_of

    from csd.models.demo import toy

    model, tokenizer = toy()
    found = main_of("constraints.py")(
        model, tokenizer, samples=3, grammar=find_spec("llguidance") is not None
    )
    assert found["audit"]["honest"]["different"] == 0 < found["audit"]["tampered"]["different"]
    assert len(found["thought"]) == 3
    assert "thoughts were cut" in capsys.readouterr().out
