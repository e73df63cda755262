"""The forward pass of a step over chains of drafts, timed in alternation with others."""

import time
from collections.abc import Callable

import torch

import csd
from csd.engine.resources.sizes import Room
from csd.engine.step.prefill import read_prompt
from csd.engine.step.step import Step
from csd.state.pool import Pool

SLOTS, PROMPT = 8, 128
SHAPE = dict(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def filled(engine: csd.Engine) -> Step:
    """Returns a step whose slots share one prompt."""
    with torch.inference_mode(False):
        prompt = PROMPT // 64
        room = Room(SLOTS, 1, prompt, SLOTS + prompt, engine.caches.rows(SLOTS))
        step = engine.caches.allocate(room, 1)
    step.drafting = False
    step.cache.take(step.cache.prompt_pages, 0, PROMPT)
    for s in range(SLOTS):
        step.cache.take(step.cache.slot_pages, s, 1)
    step.slots.group.zero_()
    step.slots.live.fill_(True)
    step.slots.prompt_len[0] = PROMPT
    step.slots.context[:, 0] = 0
    read_prompt(step, 0, [i % 1000 for i in range(PROMPT)], 0)
    return step


def passes(step: Step, rows: int) -> Callable[[], object]:
    """Returns the call of a forward pass over `rows` rows, a chain of drafts in each slot."""
    each, groups = rows // SLOTS, step.slots.group_key.shape[0]
    chains = Pool.empty(rows, SLOTS, groups, 1)
    depth = torch.arange(each).repeat(SLOTS)
    chains.token.random_(1000)
    chains.position.copy_(PROMPT + depth)
    chains.slot.copy_(torch.arange(SLOTS).repeat_interleave(each))
    chains.ancestors.copy_(2 ** (depth + 1) - 1)
    chains.slot_start.copy_(torch.arange(SLOTS) * each)
    chains.slot_nodes.fill_(each)
    chains.group_start[1:] = rows
    return lambda: step.forward(chains)


def alternated(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            # the first round compiles and is not timed
            if i:
                seconds[name].append(time.perf_counter() - begun)
    return seconds
