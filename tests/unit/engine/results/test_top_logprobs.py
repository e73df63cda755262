"""Measures of places beside their tokens, and the fields of `to_dict`."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.models.checkpoints import VOCAB, build
from helpers.models.scripted import VOCAB as VOCAB_OF_LETTERS
from helpers.models.scripted import Letters, PrefixSum, engine

import csd
from csd.engine.results.logprobs import largest

PROMPT = [5, 17, 3, 60, 17, 3, 9]
ASKED = dict(num_samples=3, max_new_tokens=10, seed=4, temperature=0.8, top_k=9)


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def twin():
    return build("llama", dtype=torch.float64)


def distributions(model, ids):
    """The model's log-probabilities behind every token."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("rules", [{}, dict(suppress_tokens=[3, 9, 17])], ids=["free", "rules"])
@pytest.mark.parametrize("budget", [0, 24])
def test_measures_are_the_models_own(model, twin, static, rules, budget):
    with csd.Engine(twin, static=static, max_slots=2) as e:
        plain = e.generate(PROMPT, budget=budget, **ASKED, **rules)
        out = e.generate(
            PROMPT,
            budget=budget,
            top_logprobs=4,
            entropy=True,
            prompt_logprobs=True,
            **ASKED,
            **rules,
        )
    assert out.tokens == plain.tokens and out.raw_logprobs == plain.raw_logprobs
    assert plain[0].top_logprobs == plain[0].entropies == []
    assert plain.prompt_logprobs is None
    probs = distributions(model, PROMPT)
    assert out.prompt_logprobs[0] is None
    want = [float(probs[i, t]) for i, t in enumerate(PROMPT[1:])]
    assert out.prompt_logprobs[1:] == pytest.approx(want, abs=1e-9)
    for sample in out:
        probs = distributions(model, PROMPT + sample.tokens)[len(PROMPT) - 1 : -1]
        entropy = -(probs.exp() * probs).sum(-1)
        assert sample.entropies == pytest.approx(entropy.tolist(), abs=1e-9)
        top = probs.topk(4)
        for pairs, ids, values in zip(sample.top_logprobs, top.indices, top.values, strict=True):
            assert [token for token, _ in pairs] == ids.tolist()
            assert [value for _, value in pairs] == pytest.approx(values.tolist(), abs=1e-9)


def test_each_is_kept_where_it_is_asked_for(twin):
    with csd.Engine(twin) as e:
        out = e.generate(PROMPT, entropy=True, **ASKED)
        assert len(out[0].entropies) == len(out[0].tokens) and out[0].top_logprobs == []
        out = e.generate([7], top_logprobs=20, prompt_logprobs=True, **ASKED)
        assert out.prompt_logprobs == [None]
        assert {len(pairs) for pairs in out[0].top_logprobs} == {20}
        with pytest.raises(ValueError, match="top_logprobs must be at most 20, got 21"):
            e.generate(PROMPT, top_logprobs=21)


def test_a_long_prompt_is_measured_chunk_by_chunk(model, twin):
    prompt = torch.randint(VOCAB, (75,), generator=torch.Generator().manual_seed(0)).tolist()
    with csd.Engine(twin, prefill_chunk=20) as e:
        out = e.generate([prompt, PROMPT], prompt_logprobs=True, max_new_tokens=2, seed=0)
    for ids, result in zip((prompt, PROMPT), out, strict=True):
        probs = distributions(model, ids)
        want = [float(probs[i, t]) for i, t in enumerate(ids[1:])]
        assert result.prompt_logprobs == [None, *[pytest.approx(x, abs=1e-9) for x in want]]


def test_samples_that_a_stop_string_ends_are_as_long(twin):
    e = engine(PrefixSum(), Letters())
    out = csd.generate(
        e,
        "ab",
        num_samples=8,
        max_new_tokens=30,
        stop=["b", "ca"],
        top_logprobs=2,
        entropy=True,
        budget=30,
        seed=0,
    )
    assert "stop" in out.finish_reasons
    for sample in out:
        assert len(sample.tokens) == len(sample.top_logprobs) == len(sample.entropies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_logits_go_by_token_id(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (6, 50), generator=generator).to(dtype)
    x[0, 3], x[1] = -0.0, -torch.inf
    want = x.double().sort(dim=-1, descending=True, stable=True).indices[:, :12]
    assert torch.equal(largest(x, 12), want)


def documented_keys():
    page = (Path(__file__).parents[4] / "docs" / "generate.md").read_text()
    section = page.partition("## Keys of a result")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)


def test_a_result_has_the_documented_keys_in_json(twin):
    with csd.Engine(twin) as e:
        results = e.generate(
            [PROMPT, [3, 4], [1] * 600],
            top_logprobs=3,
            entropy=True,
            prompt_logprobs=True,
            max_thinking_tokens=2,
            thinking_tags=[[3], [9]],
            on_error="return",
            **ASKED,
        )
        results.append(e.generate(PROMPT, max_new_tokens=3))
    scripted = engine(PrefixSum(), Letters())
    results.append(csd.generate(scripted, "ab", num_samples=6, stop="c", stop_token_ids=[7]))
    for result in results:
        made = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert [*made] == documented_keys()
        lists = {len(v) for k, v in made.items() if isinstance(v, list) and "prompt" not in k}
        assert lists == {len(result)}


class Masked(PrefixSum):
    """A model that never gives the last tokens of its vocabulary."""

    def logits(self, hidden):
        return super().logits(hidden).index_fill(1, torch.arange(20, VOCAB_OF_LETTERS), -torch.inf)


def test_a_token_without_probability_is_null():
    e = engine(Masked(), Letters())
    out = csd.generate(
        e,
        "bz",
        num_samples=2,
        max_new_tokens=4,
        max_thinking_tokens=1,
        thinking_tags=("z", "y"),
        top_logprobs=20,
        entropy=True,
        prompt_logprobs=True,
        seed=0,
        logit_bias={0: -torch.inf},
    )
    made = json.loads(json.dumps(out.to_dict(), allow_nan=False))
    assert out.prompt_logprobs == [None, -torch.inf]
    assert made["prompt_logprobs"] == [None, None]
    for sample, raw, logprobs in zip(out, made["raw_logprobs"], made["logprobs"], strict=True):
        assert sample.forced == [x is None for x in raw] and None not in logprobs
        assert all(x > 0 for x in sample.entropies)
