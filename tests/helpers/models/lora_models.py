"""Models with adapters of peft, what csd draws from them, and the loop's tokens."""

import pytest
import torch
from helpers.models.families import build, convert
from helpers.oracles import oracle

import csd

peft = pytest.importorskip("peft")
PROMPT = [(7 * i + 3) % 61 for i in range(20)]
TOKENS = 8


def lora(**more):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **more)


def adapted(name="llama", dtype=torch.float64, spread=0.3, seed=0, **more):
    """A model with two adapters, whose weights are random."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(
        build(name, dtype, seed), lora(**more), autocast_adapter_dtype=False
    )
    model.add_adapter("other", lora())
    return randomised(model, dtype, spread)


def drawn(model, budget=8, **more):
    out = csd.generate(
        model,
        PROMPT,
        num_samples=2,
        seed=4,
        max_new_tokens=TOKENS,
        budget=budget,
        temperature=0.7,
        end_token_ids=[],
        **more,
    )
    return out.tokens


@torch.no_grad()
def loop(model):
    return [
        oracle.generate(model, PROMPT, seed=4, sample=i, max_new_tokens=TOKENS, temperature=0.7)[0]
        for i in range(2)
    ]


def randomised(model, dtype=torch.float64, spread=0.3):
    for part, weight in model.named_parameters():
        if "lora_" in part:
            torch.nn.init.normal_(weight, std=spread)
    return convert(model, dtype).eval()
