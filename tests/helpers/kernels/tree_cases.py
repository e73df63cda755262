"""Drafted trees to verify, and logits that often agree with them."""

import random
from dataclasses import replace

import torch
from helpers.kernels.draft_cases import CONFIG, random_graph, random_slots

from csd.kernels.draft import draft_tree_ref


def trees(seed, count=7, rows=30, vocab=97, live=None):
    """Drafted trees over tokens below 6, and slots over `vocab` tokens."""
    rng = random.Random(seed)
    slots = random_slots(rng, count, live=live)
    slots.live[rng.randrange(count)] = True
    slots.max_new[:] = slots.generated
    slots.max_new += torch.tensor([rng.choice([1, 3, 30]) for _ in range(count)])
    slots.stop_ids.fill_(-1)
    slots.seen = torch.zeros(count, (vocab + 31) // 32, dtype=torch.int32)
    pool = draft_tree_ref(random_graph(rng).table(), slots, rows, replace(CONFIG, max_depth=6))
    return pool, slots


def random_logits(rows, vocab, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * scale
    # drafted tokens are often right
    logits[:, :6] += 6
    return logits
