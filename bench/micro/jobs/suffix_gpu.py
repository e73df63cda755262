"""SuffixGPU's drafter, on texts like those that the graph is timed with."""

import random

import torch

from bench.micro.jobs.step_state import Sizes


def suffix_gpu_job(sizes: Sizes, device, tokens: int = 16):
    """Returns a call that drafts a chain of `tokens` for every slot from its own text.

    Raises ImportError if the package suffix-gpu is absent.
    """
    from suffix_gpu import SuffixGPUDrafter

    rng = random.Random(0)
    base = [rng.randrange(1, 2000) for _ in range(sizes.text)]
    texts = [[t if rng.random() < 0.9 else rng.randrange(1, 2000) for t in base]]
    texts = [texts[0] + rng.sample(texts[0], 8) + texts[0][:64] for _ in range(sizes.slots)]
    text = torch.tensor(texts, dtype=torch.int32, device=device)
    # room for tokens to be sampled
    buffer = torch.nn.functional.pad(text, (0, 1024))
    length = torch.full((sizes.slots,), text.shape[1], dtype=torch.int32, device=device)
    drafter = SuffixGPUDrafter(k=tokens, device=device)
    draft, valid = drafter.propose(length, buffer)
    if not bool((valid > 0).any()):
        raise RuntimeError(f"nothing was drafted, got {draft.tolist()[:2]}")
    return lambda: drafter.propose(length, buffer)
