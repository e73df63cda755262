"""Engines for options of rows, and a prompt, tags of thoughts and a processor for them."""

import math
from functools import cache

import torch
import transformers
from helpers.models.checkpoints import build

import csd

PROMPT = [5, 17, 3, 60, 17, 3, 9]
TAGS = ((3,), (17, 9))


class NoEven(transformers.LogitsProcessor):
    """Bans even tokens behind prefixes of even length, as a user would write it."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 2 == 0:
            scores[:, ::2] = -math.inf
        return scores


@cache
def model_and_twin():
    """csd rebinds the parameters of its model: the loop has one of its own."""
    model, twin = (build("llama", dtype=torch.float64) for _ in range(2))
    twin.generation_config.eos_token_id = None
    return model, twin


@cache
def engine_of(kind):
    machine = {
        "reference": dict(kernels="reference"),
        "cpu": {},
        "static": dict(static=True, lag=2),
        "few-slots": dict(max_slots=2, lag=1),
    }
    return csd.Engine(model_and_twin()[1], **machine[kind])
