"""Log-probabilities of completions by a plain forward of each, and their gradients."""

import copy
import math

import torch
from torch.overrides import TorchFunctionMode


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


class Wide(TorchFunctionMode):
    """Modules that compute parts in float32, as norms and softmax, compute them in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


def within_plain(models, values_of, plain_values_of):
    """Gradients through `values_of(model)` err at most twice as much as those of a plain run.

    Both against float64, relative to each parameter's gradient. models: of one kind, with different
    weights. A forward's rounding is one draw, which a model amplifies, and all gradients of the
    pass have that factor: the ratio of the errors varies several times from model to model, so the
    bound holds for its geometric mean.
    """
    ratios = []
    for seed, model in enumerate(models):
        wide = copy.deepcopy(model).double()
        with Wide():
            exact = gradients(wide, weighted(plain_values_of(wide), seed))
        errors = []
        for run in (values_of, plain_values_of):
            found = gradients(model, weighted(run(model), seed))
            assert found.keys() == exact.keys()
            relative = [(found[n].double() - x).norm() / x.norm() for n, x in exact.items()]
            errors.append(float(torch.stack(relative).norm()))
        ratios.append(errors[0] / errors[1])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert mean <= 2, f"errors are {mean:.2f} times a plain run's: {ratios}"
