"""`csd.logprobs`: log-probabilities of completions, with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csd.engine.options import read_without_config
from csd.engine.options.params import ENDS, TOKEN_RULES, SamplingParams, limited, resolve_for_given
from csd.gradient.policy import Policy, policy_of
from csd.gradient.rows import Rows
from csd.models.text.context import read_completions
from csd.models.text.prompts import parse
from csd.state.filters import FILTERS
from csd.utils.check import shown
from csd.utils.torch_state import plain_torch

# arguments of `generate` that apply
TAKEN = (
    *FILTERS,
    *TOKEN_RULES,
    "min_new_tokens",
    *ENDS,
    "tokenizer",
    "attention_mask",
    "chat_template_kwargs",
)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of completions, in the form of the completions.

    For completions as lists, each value is a list of tensors [tokens] (with several prompts a list
    of these lists); for padded completions it is a tensor [N, T] with zeros in padding.
    """

    logprobs: Any  # by the distribution that the samples are drawn from; raw if greedy
    raw_logprobs: Any  # by the model
    entropies: Any  # of the model; None unless asked for
    exact: bool  # True if values have the bits of an exact engine's samples
    why: str | None  # the reason for which they do not
    rows: int  # rows that were computed
    unshared_rows: int  # rows without shared prompts and prefixes


def logprobs(
    model: Any,
    prompt: Any,
    completions: Any,
    *,
    mask: torch.Tensor | None = None,
    entropy: bool = False,
    checkpoint: bool = False,
    **options: Any,
) -> Logprobs:
    """Log-probabilities of completions, differentiable in the model's parameters and adapters.

    model: a `transformers` model (with adapters of peft, in DDP, compiled), or a `csd.Engine` of
        one. It computes in the dtype of its weights, whatever autocast is around the call.
    prompt: as in `csd.generate`. Equal prompts, and common prefixes of completions, are computed
        once.
    completions: of one prompt, a list of token ids, texts or tensors, or a tensor [N, T]; of a list
        of prompts, a list of these, or a tensor [B, T] with one completion per prompt.
    mask: [N, T] or [B, T] for completions in a tensor: 1 for tokens, then 0 for padding.
    entropy: whether the entropy of the model's distribution is computed at each token.
    checkpoint: whether the backward computes each layer again, to save memory.
    options: filters and constraints of `csd.generate`, each off by default, whatever the model's
        generation config has; `min_new_tokens` with the arguments for end tokens, which are by
        default those of sampling; `tokenizer`, `attention_mask` and `chat_template_kwargs`.

    Values of a model that the fused decoder runs have the bits of samples of the engine `model`, if
    it is exact, or of an exact engine of the module `model`: its operations compute them, and the
    gradient is that of plain products. Others are equal up to rounding (`Logprobs.exact`,
    `Logprobs.why`). Logits exist for some rows at a time.
    The set of tokens that filters keep is a constant to the gradient; a token outside of it has
    -inf and no gradient.

    Raises ValueError or TypeError for arguments that cannot be served, naming the argument, and
    for a model in training mode with dropout; NotImplementedError for layers with a state.
    """
    asked = read_without_config(options, TAKEN)
    module, policy, chunk, tokenizer, differs = policy_of(model)
    config = policy.loaded.current_config()
    tokenizer = asked["tokenizer"] or tokenizer
    prompts, many = parse(
        prompt,
        tokenizer,
        config.vocab,
        asked["attention_mask"],
        asked["chat_template_kwargs"],
        config.context,
    )
    padded = torch.is_tensor(completions) and completions.dim() == 2
    if mask is not None and not padded:
        raise ValueError(f"mask must be None for completions as a list, got {shown(mask)}")
    if padded:
        lengths = _lengths(completions, mask)
        if many and len(completions) != len(prompts):
            raise ValueError(
                f"completions must have a row for each of {len(prompts)} prompts, got "
                f"{len(completions)}"
            )
        rows = [row[:n] for row, n in zip(completions.tolist(), lengths, strict=True)]
        owners = [i if many else 0 for i, row in enumerate(rows) if row]
        flat = [row for row in rows if row]
        # a batch may have no tokens at all
        if flat:
            flat = read_completions(flat, prompts[:1], False, None, config.vocab)[0]
    else:
        lists = read_completions(completions, prompts, many, tokenizer, config.vocab)
        owners = [i for i, own in enumerate(lists) for _ in own]
        flat = [tokens for own in lists for tokens in own]
    longest = max(map(len, flat), default=1)
    params = resolve_for_given(
        policy.loaded.current_generation_config(),
        asked,
        longest,
        vocab=config.vocab,
        tokenizer=tokenizer,
    )
    params = limited(params, config.context, max(map(len, prompts)), "prompt")
    values, trie = flat_logprobs(
        module,
        policy,
        [prompts[i] for i in owners],
        flat,
        params,
        chunk=chunk,
        entropy=entropy,
        checkpoint=checkpoint,
    )
    if padded:
        is_token = torch.arange(completions.shape[1]) < torch.tensor(lengths)[:, None]
        is_token = is_token.to(values[0].device)
        parts = [x.new_zeros(is_token.shape).masked_scatter(is_token, x) for x in values]
    else:
        parts = [_listed(x, lists, many) for x in values]
    why = policy.why_with(params) or differs
    logp, raw, entropies = (*parts, None)[:3]
    return Logprobs(logp, raw, entropies, why is None, why, trie.count, trie.unshared)


def flat_logprobs(
    module: nn.Module,
    policy: Policy,
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    params: SamplingParams,
    *,
    chunk: int,
    entropy: bool,
    checkpoint: bool,
) -> tuple[list[torch.Tensor], Rows]:
    """Values [T] of all completions' tokens, one after the other, and the rows of the pass.

    prompts: of each completion. Returns log-probabilities, raw ones, and entropies if wanted. Those
    of no completions are differentiable too, with gradients of 0.
    """
    _refuse_dropout(module)
    if not completions:
        wide = torch.promote_types(policy.loaded.dtype, torch.float32)
        nothing = torch.cat([p.flatten()[:0] for p in module.parameters()]).to(wide)
        return [nothing] * (3 if entropy else 2), Rows.of([], [], nothing.device)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(i)
    listed = [[completions[i] for i in own] for own in groups.values()]
    device, grad = policy.loaded.device, torch.is_grad_enabled()
    with plain_torch(), torch.set_grad_enabled(grad):
        rows = Rows.of([[*prompt] for prompt in groups], listed, device)
        values = policy.values(
            module, rows, params, chunk=chunk, entropy=entropy, recompute=checkpoint
        )
        starts = torch.tensor([0, *map(len, completions)]).cumsum(0).tolist()
        order = [j for own in groups.values() for i in own for j in range(*starts[i : i + 2])]
        back = torch.tensor(order, device=device).argsort()
        return [x[back] for x in values], rows


def _lengths(completions: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Tokens of each row. Raises ValueError unless padding follows the tokens of a row."""
    if mask is None:
        return [completions.shape[1]] * completions.shape[0]
    if not torch.is_tensor(mask) or mask.shape != completions.shape:
        raise ValueError(
            f"mask must be a tensor of the completions' shape {tuple(completions.shape)}, got "
            f"{shown(mask)}"
        )
    is_token = mask.bool()
    lengths = is_token.sum(-1)
    first = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    if not bool((first == is_token).all()):
        raise ValueError("mask must be 1 for the tokens of a row, then 0 for padding after them")
    return [int(n) for n in lengths.tolist()]


def _listed(flat: torch.Tensor, lists: list[list[list[int]]], many: bool) -> Any:
    parts = iter(flat.split([len(tokens) for own in lists for tokens in own]))
    by_prompt = [[next(parts) for _ in own] for own in lists]
    return by_prompt if many else by_prompt[0]


def _refuse_dropout(module: nn.Module) -> None:
    """Raises ValueError for a module whose forward would draw dropout or a router's noise."""
    for name, part in module.named_modules():
        if not part.training:
            continue
        rates = {"p": part.p} if isinstance(part, nn.Dropout) else vars(part)
        for option, rate in rates.items():
            noisy = option == "p" or "dropout" in option or "jitter" in option
            if noisy and isinstance(rate, float) and rate > 0:
                kind = "dropout" if "jitter" not in option else option
                raise ValueError(
                    f"{name or 'model'} has {kind} {rate} in training mode, with which no sample "
                    "was drawn: set it to 0, or call model.eval()"
                )
