"""Bad input is refused with an error that names the argument."""

import math

import pytest
import torch
from helpers.models.scripted import VOCAB, Letters, PrefixSum, engine
from transformers import BatchEncoding, GenerationConfig

import csd

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def small():
    return engine(PrefixSum(context=64), Letters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(num_samples=0), ValueError, "num_samples must be at least 1, got 0"),
        (dict(num_samples=2.0), TypeError, "num_samples"),
        (dict(max_new_tokens=65), ValueError, "^max_new_tokens=65 exceeds the model's"),
        (dict(dtype="bfloat15"), ValueError, "dtype must be a torch.dtype or its name"),
        (dict(dtype=16), TypeError, "dtype must be a torch.dtype or its name"),
        (dict(num_samples=True), TypeError, "num_samples"),
        (dict(first_sample=-1), ValueError, "first_sample"),
        (dict(temperature=-0.1), ValueError, "temperature"),
        (dict(temperature=math.nan), ValueError, "temperature"),
        (dict(temperature=math.inf), ValueError, "temperature"),
        (dict(temperature="hot"), TypeError, "temperature"),
        (dict(top_p=0.0), ValueError, r"top_p must lie in \(0, 1\], got 0"),
        (dict(top_p=1.5), ValueError, "top_p"),
        (dict(min_p=-0.5), ValueError, "min_p"),
        (dict(top_k=-1), ValueError, "top_k"),
        (dict(top_k=2.5), TypeError, "top_k"),
        (dict(repetition_penalty=0), ValueError, "repetition_penalty"),
        (dict(max_new_tokens=0), ValueError, "max_new_tokens"),
        (dict(max_new_tokens=63), ValueError, "context of 64"),
        (
            dict(min_new_tokens=9, max_new_tokens=8),
            ValueError,
            "min_new_tokens must be at most max_new_tokens=8, got 9",
        ),
        (dict(stop=""), ValueError, "stop"),
        (dict(stop=[3]), ValueError, "stop"),
        (dict(stop_token_ids=[VOCAB]), ValueError, "stop_token_ids"),
        (dict(stop_token_ids=["a"]), TypeError, "stop_token_ids"),
        (dict(seed=1.5), TypeError, "seed"),
        (dict(budget=-1), ValueError, "budget"),
        (dict(budget="much"), TypeError, "budget"),
        (dict(verifier="guess"), ValueError, "verifier must be one of 'match'"),
        (dict(drafter="oracle"), ValueError, "drafter must be one of"),
        (dict(num_sample=3), TypeError, "unknown argument 'num_sample'"),
        (dict(device="cpu"), ValueError, "device must be set when the Engine is made"),
        (dict(attention_mask=torch.ones(1, 2)), ValueError, "attention_mask"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_options(small, options, error, message):
    with pytest.raises(error, match=message):
        csd.generate(small, "ab", **options)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ValueError, "prompt must not be empty"),
        ([], ValueError, "empty list"),
        (torch.tensor([], dtype=torch.long), ValueError, "prompt must not be empty"),
        (7, TypeError, "prompt must be"),
        ([1, VOCAB], ValueError, f"token id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ([1, -1], ValueError, "outside the vocabulary"),
        ([1, 2.0], TypeError, "token ids"),
        (["ab", ""], ValueError, "prompt 1 must not be empty"),
        ([[1, 2], [3, 99]], ValueError, "prompt 1 has token id 99"),
        (["ab", None], TypeError, "prompt 1"),
        (torch.tensor([1.0]), TypeError, "dtype torch.float32"),
        (torch.ones(2, 2, dtype=torch.long), ValueError, "needs attention_mask"),
        (torch.ones(1, 2), TypeError, "token ids"),
        ([{"role": "user", "content": "a"}], ValueError, "no chat template"),
        ([1] * 64, ValueError, "leaves no room in the model's context of 64"),
    ],
    ids=repr,
)
def test_prompts(small, prompt, error, message):
    with pytest.raises(error, match=message):
        csd.generate(small, prompt)


def test_text_needs_a_tokenizer():
    bare = engine(PrefixSum())
    with pytest.raises(ValueError, match="there is no tokenizer"):
        csd.generate(bare, "ab")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        csd.generate(bare, [1], stop="a")


@pytest.mark.parametrize(
    "asked",
    [
        dict(num_beams=4),
        dict(guidance_scale=1.5),
        dict(eta_cutoff=0.01),
        dict(begin_suppress_tokens=[3]),
    ],
    ids=str,
)
def test_generation_config_that_cannot_be_served(asked):
    name = next(iter(asked))
    config = GenerationConfig(**asked)
    with pytest.raises(ValueError, match=f"sets {name}=.*generation_config.{name} = None"):
        csd.generate(engine(PrefixSum(), generation_config=config), [1], max_new_tokens=1)


def test_generation_config_is_followed_and_overruled():
    model = PrefixSum(sharpness=4.0)
    config = GenerationConfig(
        temperature=0.5, top_k=3, eos_token_id=[4, 9], do_sample=False, num_beams=1
    )
    followed = engine(model, generation_config=config)
    plain = engine(model)
    options = dict(num_samples=4, max_new_tokens=40, seed=1)
    asked = dict(temperature=0.5, top_k=3, stop_token_ids=[4, 9])
    expected = csd.generate(plain, [1, 2], **asked, **options)
    assert csd.generate(followed, [1, 2], **options).tokens == expected.tokens
    assert {r for r in expected.finish_reasons} == {"stop"}
    hot = csd.generate(followed, [1, 2], temperature=2.0, top_k=0, ignore_eos=True, **options)
    expected = csd.generate(plain, [1, 2], temperature=2.0, **options)
    assert hot.tokens == expected.tokens


def test_seed_comes_from_torch():
    e = engine(PrefixSum(sharpness=2.0))
    torch.manual_seed(5)
    first = csd.generate(e, [1], max_new_tokens=12)
    second = csd.generate(e, [1], max_new_tokens=12)
    torch.manual_seed(5)
    again = csd.generate(e, [1], max_new_tokens=12)
    assert first.seed == again.seed != second.seed
    assert first.tokens == again.tokens != second.tokens
    assert csd.generate(e, [1], max_new_tokens=12, seed=first.seed).tokens == first.tokens


def test_padded_rows_equal_their_unpadded_prompts():
    e = engine(PrefixSum(sharpness=2.0))
    rows = [[3, 1, 4], [1, 5, 9, 2, 6]]
    ids = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -len(row) :] = torch.tensor(row)
        mask[i, -len(row) :] = 1
    options = dict(max_new_tokens=9, seed=4)
    padded = csd.generate(e, ids, attention_mask=mask, **options)
    assert [r.tokens for r in padded] == [csd.generate(e, row, **options).tokens for row in rows]
    assert [r.prompt_ids for r in padded] == rows


def test_a_tokenizers_encoding_is_its_ids_without_padding():
    e = engine(PrefixSum(sharpness=2.0))
    rows = [[3, 1, 4], [1, 5, 9, 2, 6]]
    options = dict(max_new_tokens=9, seed=4)
    expected = [r.tokens for r in csd.generate(e, rows, **options)]
    left = [[0, 0, *rows[0]], rows[1]], [[0, 0, 1, 1, 1], [1] * 5]
    for ids, mask in (rows, [[1] * 3, [1] * 5]), left, tuple(map(torch.tensor, left)):
        given = BatchEncoding({"input_ids": ids, "attention_mask": mask})
        assert [r.tokens for r in csd.generate(e, given, **options)] == expected
        assert [r.prompt_ids for r in csd.generate(e, given, **options)] == rows
    one = BatchEncoding({"input_ids": rows[0], "attention_mask": [1, 1, 1]})
    assert csd.generate(e, one, **options).tokens == expected[0]
    row = torch.tensor(rows[:1])
    assert csd.generate(e, BatchEncoding({"input_ids": row}), **options)[0].tokens == expected[0]
    assert csd.generate(e, row, **options)[0].tokens == expected[0]
    with pytest.raises(ValueError, match="attention_mask is part of a prompt"):
        csd.generate(e, one, attention_mask=torch.ones(1, 3))


def test_max_slots_must_be_whole():
    with pytest.raises(ValueError, match="max_slots"):
        engine(PrefixSum(), max_slots=0)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_share_of_0_is_greedy_or_refused(small, name):
    """Clients send it with temperature 0, where no filter has an effect."""
    options = dict(num_samples=2, max_new_tokens=8, seed=0)
    greedy = csd.generate(small, "abc", temperature=0, **options)
    for zero in (0, 0.0):
        same = csd.generate(small, "abc", temperature=0, **{name: zero}, **options)
        assert (same.tokens, same.logprobs) == (greedy.tokens, greedy.logprobs)
    for options_of in (dict(temperature=0.5), {}):
        with pytest.raises(ValueError, match=rf"^{name} must lie in \(0, 1\], got 0 with temp"):
            csd.generate(small, "abc", **{name: 0}, **options_of, **options)
    # also where the model's own settings have it
    own = GenerationConfig()
    setattr(own, name, 0.0)
    with engine(PrefixSum(context=64), Letters(), own) as e:
        assert csd.generate(e, "abc", temperature=0, **options).tokens == greedy.tokens
        with pytest.raises(ValueError, match=f"^{name} of the model's generation config must lie"):
            csd.generate(e, "abc", **options)
