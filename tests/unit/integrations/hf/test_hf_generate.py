"""`model.generate(custom_generate=csd.hf_generate)` returns what `generate` returns."""

import pytest
import torch
from helpers.models import checkpoints
from helpers.oracles import oracle
from helpers.runs.hf_generate_cases import (
    REFUSED,
    ROWS,
    Collect,
    Halved,
    generate,
    left_padded,
    new_tokens,
)
from transformers import GenerationConfig, LogitsProcessorList

import csd
from csd.engine.generate import engine_for


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama", dtype=torch.float64)


def test_left_padded_rows_equal_unpadded_calls(model):
    padded = generate(model, ROWS, num_return_sequences=3)
    assert padded.shape[0] == 9
    assert padded[:, :9].tolist() == left_padded([r for r in ROWS for _ in range(3)])[0].tolist()
    found = new_tokens(padded, 9)
    for i, row in enumerate(ROWS):
        alone = generate(model, [row], num_return_sequences=3)
        assert alone[:, : len(row)].tolist() == [row] * 3
        assert new_tokens(alone, len(row)) == found[3 * i : 3 * i + 3]
    assert len({len(r) for r in found}) > 1  # some rows ended early and were padded


def test_tokens_are_plain_sampling_with_the_processing_of_the_config(model):
    """top_k is 50 where nobody says otherwise: transformers' default."""
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    cases = [
        (dict(), dict(top_k=50)),
        (dict(top_k=0, temperature=0.8), dict(temperature=0.8)),
        (
            dict(top_k=7, top_p=0.8, min_p=0.05, repetition_penalty=1.3, min_new_tokens=9),
            dict(top_k=7, top_p=0.8, min_p=0.05, repetition_penalty=1.3, min_new_tokens=9),
        ),
        (dict(typical_p=0.5), dict(top_k=50, typical_p=0.5)),
    ]
    for asked, params in cases:
        found = new_tokens(generate(model, ROWS[:2], num_return_sequences=2, **asked), 5)
        expected = [
            oracle.generate(
                model,
                row,
                seed=seed,
                sample=i,
                max_new_tokens=24,
                end_ids=checkpoints.STOP,
                **params,
            )[0]
            for row in ROWS[:2]
            for i in range(2)
        ]
        assert found == expected


def test_bans_of_the_config_and_processors_are_served(model):
    bans = dict(no_repeat_ngram_size=2, suppress_tokens=[3, 50])
    words = [[5], [1], [9, 40], [7, 7]]
    processors = LogitsProcessorList([Halved()])
    torch.manual_seed(11)
    seed = int(torch.randint(2**63 - 1, ()))
    found = generate(
        model,
        ROWS[:1],
        num_return_sequences=3,
        bad_words_ids=words,
        temperature=0.4,
        logits_processor=processors,
        **bans,
    )
    # an end token alone is banned by no config
    words = [word for word in words if word != [1]]
    params = dict(bans, bad_words=words, logits_processor=processors, temperature=0.4, top_k=50)
    assert new_tokens(found, 3) == [
        oracle.generate(
            model,
            ROWS[0],
            seed=seed,
            sample=i,
            max_new_tokens=24,
            end_ids=checkpoints.STOP,
            **params,
        )[0]
        for i in range(3)
    ]
    asked = dict(max_new_tokens=24, do_sample=False, logits_processor=processors, **bans)
    ids = torch.tensor(ROWS[1:2])
    want = model.generate(ids, **asked)
    assert model.generate(ids, custom_generate=csd.hf_generate, **asked).tolist() == want.tolist()


def test_equal_rows_are_one_group_adjacent_or_not(model, monkeypatch):
    groups = []
    run = csd.Engine.run

    def watched(self, requests, settings):
        groups.append([(request.prompt, len(request.samples)) for request in requests])
        return run(self, requests, settings)

    monkeypatch.setattr(csd.Engine, "run", watched)
    mixed = generate(model, [ROWS[0], ROWS[1], ROWS[0], ROWS[0], ROWS[1]])
    assert groups == [[(ROWS[0], 3), (ROWS[1], 2)]]
    found = new_tokens(mixed, 5)
    apart = new_tokens(generate(model, [ROWS[0]], num_return_sequences=3), 3)
    assert [found[0], found[2], found[3]] == apart
    assert len({tuple(r) for r in apart}) == 3


def test_greedy_equals_transformers(model):
    ids, mask = left_padded(ROWS)
    for options in (dict(), dict(repetition_penalty=1.4), dict(min_length=20)):
        options |= dict(max_new_tokens=30, do_sample=False)
        expected = model.generate(ids, attention_mask=mask, **options)
        out = model.generate(ids, attention_mask=mask, custom_generate=csd.hf_generate, **options)
        assert out.tolist() == expected.tolist()


def test_scores_and_logits_are_those_of_generate(model):
    ids, mask = left_padded(ROWS)
    asked = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    for options in (
        dict(do_sample=False, repetition_penalty=1.2, min_new_tokens=3),
        dict(do_sample=True, top_k=1, temperature=0.7, top_p=0.9),
    ):
        options |= asked | dict(max_new_tokens=12)
        expected = model.generate(ids, attention_mask=mask, **options)
        out = model.generate(ids, attention_mask=mask, custom_generate=csd.hf_generate, **options)
        assert type(out) is type(expected)
        assert out.sequences.tolist() == expected.sequences.tolist()
        for name in ("scores", "logits"):
            ours, theirs = getattr(out, name), getattr(expected, name)
            assert len(ours) == len(theirs) == out.sequences.shape[1] - 9
            for a, b in zip(ours, theirs, strict=True):
                assert a.dtype == b.dtype
                # float32 of float64: processed before the rounding, or after
                eps = torch.finfo(torch.float32).eps
                torch.testing.assert_close(a, b, rtol=4 * eps, atol=eps)
    plain = generate(model, ROWS[:1], return_dict_in_generate=True)
    assert plain.scores is None and plain.logits is None and plain.past_key_values is None
    transitions = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert torch.isfinite(transitions).all()


def test_seed_comes_from_torch_or_is_given(model):
    first, again = generate(model, ROWS[:1], seed=1), generate(model, ROWS[:1], seed=1)
    other = generate(model, ROWS[:1], seed=2)
    assert first.tolist() == again.tolist() != other.tolist()
    torch.manual_seed(3)
    ids = torch.tensor(ROWS[:1])
    options = dict(do_sample=True, max_new_tokens=24, custom_generate=csd.hf_generate)
    a, b = model.generate(ids, **options), model.generate(ids, **options)
    assert a.tolist() != b.tolist()
    whole = model.generate(ids, num_return_sequences=4, seed=9, **options)
    later = model.generate(ids, num_return_sequences=2, seed=9, first_sample=2, **options)
    assert new_tokens(whole, 3)[2:] == new_tokens(later, 3)


def test_streamer_gets_the_prompt_and_then_each_token(model):
    streamer = Collect()
    out = generate(model, ROWS[:1], streamer=streamer)
    assert streamer.puts[0] == ROWS[:1]
    assert [t for put in streamer.puts[1:] for t in put] == out[0, 3:].tolist()
    assert streamer.ended == 1
    with pytest.raises(NotImplementedError, match="a streamer for a batch of 2"):
        generate(model, ROWS[:1], streamer=Collect(), num_return_sequences=2)


def test_padding_takes_the_first_end_id_when_there_is_no_pad(model, monkeypatch):
    config = GenerationConfig(eos_token_id=list(checkpoints.STOP), pad_token_id=None)
    monkeypatch.setattr(model, "generation_config", config)
    out = generate(model, ROWS, num_return_sequences=4)
    found = new_tokens(out, 9, pad=checkpoints.STOP[0])
    assert len({len(r) for r in found}) > 1


def test_no_end_tokens_and_max_length(model):
    ids = torch.tensor([ROWS[1]])
    config = GenerationConfig(max_length=17, do_sample=True, eos_token_id=-1, pad_token_id=0)
    config.eos_token_id = None
    before = model.generation_config
    model.generation_config = config
    out = model.generate(ids, custom_generate=csd.hf_generate)
    model.generation_config = before
    assert out.shape == (1, 17)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(model, name):
    options = REFUSED[name](model) if callable(REFUSED[name]) else REFUSED[name]
    inputs = {} if "inputs_embeds" in options else {"input_ids": torch.tensor(ROWS[:1])}
    if name == "output_attentions":
        options |= dict(return_dict_in_generate=True)
    with pytest.raises(NotImplementedError, match=f"csd.hf_generate does not serve .*{name}"):
        model.generate(
            **inputs,
            max_new_tokens=4,
            do_sample=True,
            custom_generate=csd.hf_generate,
            **options,
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(seed=1.5), TypeError, r"seed must be a whole number or None, got 1\.5"),
        (dict(budget="lots"), TypeError, "budget must be 'auto' or a whole number, got 'lots'"),
        (dict(first_sample=-1), ValueError, "first_sample must be at least 0, got -1"),
        (dict(first_sample="a"), TypeError, "first_sample must be a whole number, got 'a'"),
        (dict(top_p=0.0), ValueError, r"top_p of .* must lie in \(0, 1\], got 0"),
        (dict(max_new_tokens=600), ValueError, "max_new_tokens=600 exceed the model's context"),
        (dict(eos_token_id=[*range(20)]), ValueError, r"eos_token_id of .* 16 token ids, got 20"),
        (
            dict(attention_mask=torch.zeros(1, 3, dtype=torch.long)),
            ValueError,
            "at least one token of row 0",
        ),
        (dict(rows=[[5, 97]]), ValueError, "input_ids must lie in the vocabulary of 97, got 97"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_arguments_that_cannot_be_are_named(model, options, error, message):
    options = dict(max_new_tokens=4) | options
    rows = options.pop("rows", ROWS[:1])
    with pytest.raises(error, match=message):
        model.generate(
            torch.tensor(rows), do_sample=True, custom_generate=csd.hf_generate, **options
        )


def test_direct_calls_explain_custom_generate(model):
    with pytest.raises(TypeError, match="generation_config must be the one made by generate"):
        csd.hf_generate(model, torch.tensor(ROWS[:1]))


def test_a_batch_of_padded_rows_where_one_repeats(model):
    """Right-hand padding and a hole in the mask, too: a row is what its mask keeps."""
    ids = torch.tensor([[0, 5, 9], [5, 9, 0], [5, 0, 9], [5, 9, 23]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1]])
    options = dict(do_sample=True, max_new_tokens=8, seed=2, custom_generate=csd.hf_generate)
    out = model.generate(ids, attention_mask=mask, **options)
    assert out[:, :3].tolist() == ids.tolist()
    found = new_tokens(out, 3)
    alone = model.generate(ids[:1, 1:], num_return_sequences=3, **options)
    assert found[:3] == new_tokens(alone, 2)
    assert found[3] == new_tokens(model.generate(ids[3:], **options), 3)[0]


def test_a_history_drafts_and_changes_nothing(model):
    plain = generate(model, ROWS, num_return_sequences=2)
    h = csd.History()
    for _ in range(2):
        assert generate(model, ROWS, num_return_sequences=2, history=h).equal(plain)
    assert len(h) == 3 and [e.age for e in h.of(ROWS[0])] == [0, 0, 1, 1]
    with pytest.raises(TypeError, match=r"history must be a csd\.History, got list"):
        generate(model, ROWS, history=[[1]])


@pytest.fixture
def stats(monkeypatch):
    """The prompts of each call of an engine."""
    run, found = csd.Engine.run, []

    def watched(self, requests, settings):
        yield from run(self, requests, settings)
        found.append([request.progress.stats for request in requests])

    monkeypatch.setattr(csd.Engine, "run", watched)
    return found


def test_rows_draft_for_each_other_on_request(model, stats, monkeypatch):
    # some are admitted when others have finished
    engine = engine_for(model)
    engine.release()
    monkeypatch.setattr(engine.caches, "max_slots", 2)
    rows = [[5, 9, 23 + i] for i in range(4)]
    asked = dict(num_return_sequences=2, max_new_tokens=16, budget=16)
    plain = generate(model, rows, **asked)
    prior = csd.Prior(learn=True, contexts=1024)
    for _ in range(2):
        assert generate(model, rows, prior=prior, **asked).equal(plain)
    alone, first, again = ([s.prior_tokens for s in call] for call in stats)
    assert alone == first == [0] * 4 and min(again) > 0
    with pytest.raises(TypeError, match="prior must be a csd"):
        generate(model, ROWS, prior=3)
    engine.release()
