"""Best-of-N by log-probability, by a function, by a reward model."""

import copy
import math

import pytest
import torch
from helpers.checks.precision import within_eager
from transformers import AutoModelForSequenceClassification, Qwen3Config

import csd
from csd.models.demo import toy


@pytest.fixture(scope="module")
def drawn():
    model, tokenizer = toy()
    prompt = [{"role": "user", "content": "Say something."}]
    out = csd.generate(model, prompt, tokenizer=tokenizer, num_samples=5, max_new_tokens=12, seed=0)
    csd.release()
    return prompt, out, tokenizer


@pytest.fixture(scope="module")
def reward(drawn):
    config = Qwen3Config(
        vocab_size=len(drawn[2]),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        num_labels=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)


def test_by_mean_log_probability(drawn):
    _, out, _ = drawn
    best = csd.best_of(out)
    means = [sum(p) / len(p) for p in out.logprobs]
    assert best.scores == means
    assert best.sample is out[means.index(max(means))]
    assert best.score == max(means)


def test_by_a_function_with_ties_to_the_lowest_index(drawn):
    _, out, _ = drawn
    assert csd.best_of(out, lambda s: -(s.index % 2)).sample.index == 0
    assert csd.best_of(out, lambda s: s.index).sample.index == 4


def test_by_a_reward_model(drawn, reward):
    prompt, out, tokenizer = drawn
    best = csd.best_of(out, reward, tokenizer=tokenizer, prompt=prompt)
    models, alone = (reward.eval(), copy.deepcopy(reward).double().eval()), []
    for text in out.texts:
        # the template of the toy, written out
        ids = tokenizer(f"user: Say something.\nassistant: {text}\n")["input_ids"]
        with torch.no_grad():
            alone.append([m(torch.tensor([ids])).logits.double().item() for m in models])
    eager, exact = torch.tensor(alone, dtype=torch.float64).T
    scores = torch.tensor(best.scores, dtype=torch.float64)
    within_eager(scores, eager, exact, reward.config.intermediate_size, torch.float32)
    assert len(set(best.scores)) > 1
    assert best.score == max(best.scores)
    plain = csd.best_of(out, reward, tokenizer=tokenizer, prompt="Say something.")
    assert plain.scores != best.scores


def test_a_reward_model_is_left_in_its_mode(drawn, reward):
    prompt, out, tokenizer = drawn
    reward.train()
    csd.best_of(out, reward, tokenizer=tokenizer, prompt=prompt)
    assert reward.training


def test_errors_name_the_argument(drawn, reward):
    prompt, out, tokenizer = drawn
    with pytest.raises(ValueError, match="needs tokenizer="):
        csd.best_of(out, reward, prompt=prompt)
    with pytest.raises(ValueError, match="needs prompt="):
        csd.best_of(out, reward, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="num_labels=1, got 2"):
        csd.best_of(out, toy()[0], tokenizer=tokenizer, prompt=prompt)
    with pytest.raises(ValueError, match="score must be 'logprob'"):
        csd.best_of(out, "longest")
    with pytest.raises(ValueError, match="got NaN for sample 0"):
        csd.best_of(out, lambda s: math.nan)
    with pytest.raises(TypeError, match="score must return a number, got None for sample 0"):
        csd.best_of(out, lambda s: None)
    with pytest.raises(ValueError, match="at least one that was not cancelled"):
        csd.best_of([])
