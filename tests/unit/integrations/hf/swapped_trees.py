"""Trees of nodes behind prompts, and models whose attention is `csd_tree`."""

import torch
from helpers.models import checkpoints

import csd

# per slot the nodes' tokens and their parents' places; slots 0 to 2 share a prompt, 3 and 4 another
PROMPTS = ([5, 17, 60, 3, 42, 8, 9, 33] * 9, [71, 4])
SAMPLES = [3, 2]
TOKENS = [[11, 7, 8, 9, 30, 7], [2, 50], [], [90, 13, 14, 15, 16], [61]]
PARENTS = [[-1, 0, 0, 1, 3, 2], [-1, 0], [], [-1, 0, 1, 1, 0], [-1]]


def swapped(family, dtype=torch.float32):
    model = checkpoints.build(family, dtype=dtype)
    model.set_attn_implementation("csd_tree")
    assert model.config._attn_implementation == "csd_tree"
    return model


def committed(slot):
    return [(7 * slot + 3 * i) % checkpoints.VOCAB for i in range(70 if slot == 1 else slot)]


@torch.no_grad()
def filled_cache(model, dense):
    """A cache of PROMPTS[g][:-1], then every slot's prompt's last and committed tokens but one."""
    prefill = [dense(torch.tensor([p])).past_key_values for p in PROMPTS]
    cache = csd.TreeCache(prefill, SAMPLES, max_new_tokens=80)
    for slot, prompt in enumerate(slot_prompts()):
        if committed(slot):
            past = dense(torch.tensor([prompt + committed(slot)])).past_key_values
            cache.append(slot, past, start=len(prompt))
    return cache


def slot_prompts():
    return [PROMPTS[g] for g, n in enumerate(SAMPLES) for _ in range(n)]


def path(slot, j):
    """Tokens from the root to node j."""
    tokens = []
    while j >= 0:
        tokens.append(TOKENS[slot][j])
        j = PARENTS[slot][j]
    return tokens[::-1]


@torch.no_grad()
def one_by_one(dense):
    """Logits of every node, each root-to-node path run alone behind its prompt."""
    rows = []
    for slot, prompt in enumerate(slot_prompts()):
        for j in range(len(TOKENS[slot])):
            ids = prompt + committed(slot) + path(slot, j)
            rows.append(dense(torch.tensor([ids])).logits[0, -1])
    return torch.stack(rows)
