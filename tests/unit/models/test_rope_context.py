"""Contexts of models with a rope scaling, whose config may leave them at the original length."""

import pytest
import torch
from helpers.models import checkpoints
from helpers.models.families import build
from helpers.oracles.dense import some_tokens

import csd
from csd.models.fused.rope import context_of
from csd.models.load import load

PLAIN = checkpoints.CONTEXT
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0)


def config(kind, positions=PLAIN, **rope):
    return checkpoints.config(
        "llama",
        max_position_embeddings=positions,
        rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **rope),
    )


@pytest.mark.parametrize(
    ("given", "context"),
    [
        (config("default"), PLAIN),
        (config("linear", factor=4.0), 4 * PLAIN),
        (config("linear", factor=4.0, original_max_position_embeddings=128), PLAIN),
        (config("yarn", factor=4.0), 4 * PLAIN),
        (config("yarn", factor=4.0, original_max_position_embeddings=PLAIN), 4 * PLAIN),
        (config("yarn", factor=4.0, original_max_position_embeddings=128), PLAIN),
        (config("llama3", factor=8.0, original_max_position_embeddings=PLAIN, **LLAMA3), 8 * PLAIN),
        (config("llama3", factor=8.0, original_max_position_embeddings=128, **LLAMA3), PLAIN),
        (config("yarn", factor=0.5, original_max_position_embeddings=PLAIN), PLAIN),
    ],
    ids=str,
)
def test_a_scaling_extends_a_maximum_that_is_the_original_one(given, context):
    assert context_of(given) == context


@pytest.mark.parametrize("decoder", ["fused", "module"])
def test_a_text_beyond_the_original_length_is_that_of_the_module(decoder):
    rope = dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32
    )
    model = build("llama", torch.float64, max_position_embeddings=32, rope_parameters=rope)
    assert load(model, decoder=decoder).config.context == 128
    tokens = some_tokens(100) % 61
    with torch.no_grad():
        want = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
    out = csd.score(model, tokens[:50].tolist(), [tokens[50:].tolist()])
    rows = torch.arange(49, 99)
    assert torch.tensor(out.raw_logprobs[0]) == pytest.approx(want[rows, tokens[50:].long()])


def test_a_maximum_by_kind_of_layer_is_the_new_one():
    sliding = dict(rope_type="default", rope_theta=10000.0)
    full = dict(rope_type="linear", rope_theta=10000.0, factor=8.0)
    model = build(
        "gemma3_text",
        torch.float32,
        rope_parameters=dict(
            sliding_attention=sliding,
            full_attention=full,
        ),
    )
    assert context_of(model.config) == load(model).config.context == 128
