"""Texts of samples and slots that stand in them, for the paper's drafter."""

import torch

from csd.state.slots import Slots
from csd.state.texts import CHANCE_ONE, SlotTexts


def random_texts(rng, slots, rows, width, vocab=4):
    """Rows of the slots' own groups and others, some of the slots' own samples, some empty."""
    texts = SlotTexts.empty(1, width, 0, rounds=rows)
    for row in range(rows):
        length = rng.choice([0, 1, rng.randint(0, width), width])
        texts.length[row] = length
        if rng.random() < 0.9:
            texts.group_key[row] = rng.choice([11, 12])
            texts.sample[row] = rng.randrange(6)
        for i in range(length):
            # a prompt that was shorter than the query
            texts.token[row, i] = -1 if i == 0 and rng.random() < 0.1 else rng.randrange(vocab)
            texts.chance[row, i] = rng.choice([0, 1, CHANCE_ONE, rng.randint(0, CHANCE_ONE)])
        # what a row held before is still behind its length
        texts.token[row, length:] = rng.randrange(vocab)
        texts.chance[row, length:] = 77
    return texts


def random_slots(rng, count, context, vocab=4, live=0.8, temperature=1.0):
    slots = Slots.empty(count, vocab, 64, context)
    slots.group_key[:2] = torch.tensor([11, 12])[: slots.group_key.shape[0]]
    for s in range(count):
        if rng.random() < live:
            slots.live[s] = True
            slots.group[s] = rng.randrange(min(2, count))
        slots.sample[s] = rng.randrange(6)
        slots.generated[s] = rng.randrange(9)
        slots.max_new[s] = rng.choice([slots.generated[s] + 1, 30, 30])
        count = rng.choice([context, context, rng.randrange(1, context + 1)])
        slots.context[s, :count] = torch.tensor([rng.randrange(vocab) for _ in range(count)])
        if rng.random() < 0.3:
            slots.stop_ids[s, 0] = rng.randrange(vocab)
        slots.temperature[s] = temperature
    slots.prompt_len[:] = 5
    return slots
