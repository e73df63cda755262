"""Log-probabilities of completions by a plain forward of each, and their gradients."""

import copy

import torch


def chances(model, prompt, completions, temperature=1.0):
    """Log-probabilities [tokens] of each completion, each with a forward of its own."""
    found = []
    for tokens in completions:
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) / temperature
        found.append(rows.log_softmax(-1)[torch.arange(len(tokens)), tokens])
    return found


def gradients(model, loss):
    """Gradients of the trainable parameters for a loss, by name."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named])
    return {name: grad for (name, _), grad in zip(named, found, strict=True)}


def weighted(values, seed=0):
    """Sum of values, each with a random weight: a loss with a different weight for each token."""
    generator = torch.Generator().manual_seed(seed)
    return sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in values)


def within_plain(model, values_of, plain_values_of):
    """Gradients through `values_of(model)` err at most twice as much as those of a plain run.

    Both against float64, relative to each parameter's gradient and added up over all parameters and
    four losses: errors of one pass are correlated, and their ratio varies from loss to loss.
    """
    wide = copy.deepcopy(model).double()
    errors = [0.0, 0.0]
    for seed in range(4):
        exact = gradients(wide, weighted(plain_values_of(wide), seed))
        for i, run in enumerate((values_of, plain_values_of)):
            found = gradients(model, weighted(run(model), seed))
            assert found.keys() == exact.keys()
            for name, want in exact.items():
                errors[i] += float((found[name].double() - want).norm() / want.norm()) ** 2
    error, plain = (x**0.5 for x in errors)
    assert error <= 2 * plain, f"error {error:.2e}, plain {plain:.2e}"
