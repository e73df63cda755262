"""GRPO as a plain PyTorch loop, with one set of bits from the draft to the gradient.

    out = csd.generate(engine, prompt, num_samples=8)      # with drafts
    now = csd.logprobs(engine, prompt, out.tokens)         # the same numbers, with gradients

On the first update after a rollout the two log-probabilities of a token are equal bit for bit, so
the importance ratio is exactly 1; on the second it is the policy's own change. A toy model learns
to write vowels. verl, OpenRLHF or a trainer of your own call the same function.
"""

from typing import Any

import torch

import csd
from csd.models.demo import toy

PROMPTS = ["Write vowels: ", "Sing: ", "Say it with vowels only. ", "aeiou"]
SAMPLING: dict[str, Any] = dict(temperature=0.8, top_p=0.95)


def share_of_vowels(text: str) -> float:
    return sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1)


def main(steps: int = 20, tokens: int = 24, updates: int = 2, clip: float = 0.2) -> list[float]:
    """Returns the largest difference of log-probabilities on the first update of each step."""
    model, tokenizer = toy()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    differences = []
    with csd.Engine(model, tokenizer=tokenizer, exact=True) as engine:
        for step in range(steps):
            groups = engine.generate(
                PROMPTS, num_samples=8, max_new_tokens=tokens, seed=step, **SAMPLING
            )
            rewards = torch.tensor([[share_of_vowels(str(t)) for t in g.texts] for g in groups])
            spread = rewards.std(1, keepdim=True) + 1e-4
            advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
            old = [torch.tensor(x) for group in groups for x in group.logprobs]
            for update in range(updates):
                out = csd.logprobs(engine, PROMPTS, [g.tokens for g in groups], **SAMPLING)
                new = [x for group in out.logprobs for x in group]
                if update == 0:
                    pairs = zip(new, old, strict=True)
                    differences.append(max(float((x - y).detach().abs().max()) for x, y in pairs))
                loss = torch.zeros(())
                for x, y, a in zip(new, old, advantages, strict=True):
                    ratio = (x - y).exp()
                    loss -= torch.minimum(a * ratio, a * ratio.clamp(1 - clip, 1 + clip)).mean()
                optimiser.zero_grad()
                (loss / len(new)).backward()
                optimiser.step()
            print(f"step {step}: reward {rewards.mean():.3f}, difference {differences[-1]}")
    return differences


if __name__ == "__main__":
    main()
