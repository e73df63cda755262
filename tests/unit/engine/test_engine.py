"""The engine on scripted targets: caches, pages, stop rules, refill, ragged accepts."""

import pytest
import torch
from helpers.models.scripted import VOCAB, LastToken, Letters, PrefixSum, counting, engine
from helpers.runs.engine_cases import plain, prompts
from helpers.targets import few

import csd

pytestmark = pytest.mark.quick


@few(4)
@pytest.mark.parametrize("max_slots", [1, 3, 8, 64])
@pytest.mark.parametrize("budget", [0, 5, 64, "auto"])
def test_tokens_are_those_of_plain_sampling(max_slots, budget):
    """Refill, several prompts at once, page borders and ragged accepts change nothing."""
    model = PrefixSum(sharpness=8.0)
    asked = prompts(4)
    out = csd.generate(
        engine(model, max_slots=max_slots),
        asked,
        num_samples=5,
        max_new_tokens=70,
        temperature=1.0,
        seed=7,
        budget=budget,
        stop_token_ids=[3],
    )
    for prompt, result in zip(asked, out, strict=True):
        for sample in result:
            expected = plain(model, prompt, 7, sample.index, 70, end_ids=(3,))
            assert sample.tokens == expected
            assert sample.finish_reason == ("stop" if expected[-1] == 3 else "length")
            assert len(sample.logprobs) == len(sample.raw_logprobs) == len(expected)


def test_pages_in_pieces_change_nothing():
    """With its pages scattered, a slot reads the same tokens."""
    model = PrefixSum(sharpness=8.0)
    e = engine(model, max_slots=4)
    prompt = prompts(3)[2]
    kept = csd.generate(e, prompt, num_samples=4, max_new_tokens=150, seed=1)
    allocator = e.caches.step.cache.allocator
    allocator._free = allocator._free[::2] + allocator._free[1::2]
    reset = e.caches.step.cache.reset
    e.caches.step.cache.reset = lambda: None
    again = csd.generate(e, prompt, num_samples=4, max_new_tokens=150, seed=1)
    e.caches.step.cache.reset = reset
    assert kept.tokens == again.tokens


def test_a_slot_that_accepts_everything():
    """A cycle is drafted whole once it has been seen."""
    model = counting(6)
    out = csd.generate(engine(model), [0], num_samples=2, max_new_tokens=64, budget=32, seed=0)
    assert out.tokens == [[(i + 1) % 6 for i in range(64)]] * 2
    assert out.stats.tokens_per_step > 5
    assert out.stats.nodes_accepted == sum(out.stats.accepted.values())
    assert out.stats.tokens == 128


def test_a_slot_that_accepts_nothing():
    """Uniform over many tokens: drafts are proposed and refused."""
    vocab = 5000
    flat = LastToken(lambda t, p: torch.zeros(t.shape[0], vocab, dtype=torch.float64), vocab)
    out = csd.generate(engine(flat), [1], num_samples=3, max_new_tokens=20, budget=8, seed=0)
    assert out.stats.nodes_accepted == 0
    assert out.stats.tokens_per_step == 1.0
    assert len({tuple(t) for t in out.tokens}) == 3


def test_a_draft_that_runs_past_the_end_token():
    """The end token lies inside an accepted path; what follows it is not committed."""
    model = counting(12)
    e = engine(model, max_slots=1)
    first = csd.generate(e, [0], num_samples=2, max_new_tokens=40, budget=32, ignore_eos=True)
    assert first.finish_reasons == ["length", "length"]
    out = csd.generate(e, [0, 1], num_samples=2, max_new_tokens=40, stop_token_ids=[5], budget=32)
    assert out.tokens == [[2, 3, 4, 5]] * 2
    assert out.finish_reasons == ["stop", "stop"]


@pytest.mark.parametrize("longest", [1, 2, 7])
def test_a_draft_that_runs_past_max_new_tokens(longest):
    model = counting(3)
    out = csd.generate(
        engine(model, max_slots=1), [0], num_samples=3, max_new_tokens=longest, budget=16
    )
    assert out.tokens == [[(i + 1) % 3 for i in range(longest)]] * 3
    assert out.finish_reasons == ["length"] * 3


@pytest.mark.parametrize("lag", [0, 1, 5])
@pytest.mark.parametrize("stop", ["hij", "j", "fgh"], ids=str)
def test_stop_strings_across_tokens_and_lags(lag, stop):
    """A stop string ends at the token that completes it, however late the host notices."""
    model = counting(26)
    out = csd.generate(
        engine(model, Letters(), lag=lag, max_slots=2),
        "abc",
        num_samples=3,
        max_new_tokens=60,
        stop=["zzz", stop],
        budget=16,
        seed=3,
    )
    whole = "defghijklm"
    end = whole.index(stop) + len(stop)
    assert out.texts == [whole[: end - len(stop)]] * 3
    assert out.tokens == [Letters()(whole[:end])["input_ids"]] * 3
    assert [len(s.logprobs) for s in out] == [end] * 3
    assert out.finish_reasons == ["stop"] * 3


@pytest.mark.parametrize("lag", [1, 5])
def test_results_do_not_depend_on_the_lag(lag):
    model = PrefixSum(sharpness=8.0)
    asked = prompts(3)
    options = dict(num_samples=4, max_new_tokens=50, seed=5, stop="e", budget=12)
    now = csd.generate(engine(model, Letters(), max_slots=3), asked, **options)
    late = csd.generate(engine(model, Letters(), max_slots=3, lag=lag), asked, **options)
    assert [r.tokens for r in now] == [r.tokens for r in late]
    assert [r.texts for r in now] == [r.texts for r in late]


def test_repeated_prompts_continue_their_sample_indices():
    model = PrefixSum(sharpness=4.0)
    e = engine(model)
    options = dict(max_new_tokens=20, seed=9)
    together = csd.generate(e, [1, 2, 3], num_samples=4, **options)
    copies = csd.generate(e, [[1, 2, 3]] * 2, num_samples=2, **options)
    assert copies[0].tokens + copies[1].tokens == together.tokens
    later = csd.generate(e, [1, 2, 3], num_samples=2, first_sample=2, **options)
    assert later.tokens == together.tokens[2:]
    assert [s.index for s in later] == [2, 3]


def test_a_groups_graph_is_its_own():
    """Texts of one prompt are not drafted for another."""
    model = counting(8)
    out = csd.generate(
        engine(model, max_slots=1), [[0, 1], [0, 1, 2, 3]], max_new_tokens=12, budget=16
    )
    alone = csd.generate(engine(model, max_slots=1), [0, 1, 2, 3], max_new_tokens=12, budget=16)
    assert out[1].stats.nodes_proposed == alone.stats.nodes_proposed
    assert out[1].stats.accepted == alone.stats.accepted


def test_provenance():
    """The prompt is the first source; a later sample copies its sibling."""
    model = counting(10)
    e = engine(model, max_slots=1)
    out = csd.generate(e, [*range(10), 0, 1], num_samples=1, max_new_tokens=8, budget=16)
    assert out.stats.accepted["prompt"] == out.stats.nodes_accepted > 0
    out = csd.generate(e, [0], num_samples=2, max_new_tokens=8, budget=16)
    assert out.stats.accepted["sibling"] == out.stats.nodes_accepted > 0
    assert [s for s in out[1].sources if s] == ["sibling"] * out.stats.nodes_accepted


def test_until_cancels_and_decides_on_the_prefix():
    model = PrefixSum(sharpness=4.0)
    asked = []

    def until(prefix):
        asked.append([s.index for s in prefix])
        return len(prefix) >= 3

    out = csd.generate(
        engine(model, max_slots=2),
        [1, 2],
        num_samples=8,
        max_new_tokens=30,
        seed=0,
        stop_token_ids=[0, 1, 2],
        until=until,
    )
    assert all(p == list(range(len(p))) for p in asked)
    assert out.finish_reasons.count("cancelled") >= 4
    assert all(r != "cancelled" for r in out.finish_reasons[:3])
    full = csd.generate(
        engine(model, max_slots=2),
        [1, 2],
        num_samples=8,
        max_new_tokens=30,
        seed=0,
        stop_token_ids=[0, 1, 2],
    )
    assert out.tokens[:3] == full.tokens[:3]


def test_closing_a_stream_leaves_the_engine_usable():
    model = PrefixSum(sharpness=4.0)
    e = engine(model, max_slots=2)
    options = dict(num_samples=6, max_new_tokens=25, seed=2)
    expected = csd.generate(e, [4, 5], **options)
    events = csd.stream(e, [4, 5], **options)
    prompt, sample = next(events)
    assert prompt == 0
    assert sample.tokens == expected.tokens[sample.index]
    with pytest.raises(RuntimeError, match="still used by a stream"):
        csd.generate(e, [4, 5], **options)
    events.close()
    assert csd.generate(e, [4, 5], **options).tokens == expected.tokens


def test_ctrl_c_is_raised_with_the_samples():
    model = PrefixSum(sharpness=4.0)
    e = engine(model, max_slots=2)
    options = dict(num_samples=4, max_new_tokens=20, seed=2)
    expected = csd.generate(e, [4, 5], **options)
    calls = []

    def interrupt(prompt, sample, tokens, text):
        calls.append(sample)
        if sample == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        csd.generate(e, [4, 5], callback=interrupt, **options)
    out = caught.value.samples
    assert out.finish_reasons[0] == "length"
    assert out.finish_reasons[3] == "cancelled"
    assert out.tokens[0] == expected.tokens[0]
    assert out.tokens[3] == expected.tokens[3][: len(out.tokens[3])]
    assert csd.generate(e, [4, 5], **options).tokens == expected.tokens


def test_nan_logits_error_names_prompt_and_sample():
    def logits_of(token, position):
        logits = torch.zeros(token.shape[0], VOCAB, dtype=torch.float64)
        return logits.masked_fill(position[:, None] >= 4, torch.nan)

    e = engine(LastToken(logits_of))
    with pytest.raises(FloatingPointError, match="after 3 tokens of sample 0 of prompt 0"):
        csd.generate(e, [0, 0], max_new_tokens=9, budget=0)
    out = csd.generate(e, [0, 0], max_new_tokens=2, budget=0)
    assert out.finish_reasons == ["length"]


def test_callback_gets_every_token_once():
    model = PrefixSum(sharpness=8.0)
    got = {}

    def callback(prompt, sample, tokens, text):
        got.setdefault((prompt, sample), []).append((tokens, text))

    out = csd.generate(
        engine(model, Letters(), max_slots=3),
        ["ab", "cd"],
        num_samples=3,
        max_new_tokens=30,
        seed=1,
        callback=callback,
    )
    for i, result in enumerate(out):
        for s in result:
            steps = got[i, s.index]
            assert [t for tokens, _ in steps for t in tokens] == s.tokens
            assert "".join(text for _, text in steps) == s.text


def test_closing_a_stream_ends_its_call_at_once():
    e = engine(PrefixSum(sharpness=2.0), max_slots=2)
    stream = e.stream([1], num_samples=4, max_new_tokens=6)
    next(stream)
    # still held by a name: nothing is left to the collector of garbage
    stream.close()
    assert len(e.generate([1], max_new_tokens=4)) == 1


def test_rates_are_of_the_whole_call():
    """Also for a prompt whose samples end long before those of the others."""
    e = engine(PrefixSum(sharpness=4.0), max_slots=2)
    out = csd.generate(e, [[1, 2], [3, 4], [5, 6]], num_samples=2, max_new_tokens=20, seed=2)
    tokens = sum(result.stats.tokens for result in out)
    assert all(result.stats.call_tokens == tokens for result in out)
    assert len({result.stats.tokens_per_second for result in out}) == 1
    assert all(result.stats.seconds == out[0].stats.seconds for result in out)
    assert f"of a call that drew {tokens:,}" in str(out[0].stats)
