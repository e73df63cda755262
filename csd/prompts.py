"""Prompts as users write them, turned into token ids."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def parse(
    prompt: Any,
    tokenizer: Any,
    vocab: int,
    attention_mask: torch.Tensor | None = None,
    chat_template_kwargs: dict | None = None,
) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether `prompt` was a list of prompts.

    One prompt is a str (taken as it is), a list of message dicts (through the tokenizer's chat
    template), or token ids as a list or 1-D tensor. A 2-D tensor is a batch; padded rows need
    `attention_mask`.
    """
    if torch.is_tensor(prompt) and prompt.dim() == 2:
        rows = _unpad(prompt, attention_mask)
        return [_check(row, vocab, f"prompt {i}") for i, row in enumerate(rows)], True
    if attention_mask is not None:
        raise ValueError("attention_mask goes with a 2-D tensor of prompts only")
    if _is_one(prompt):
        return [_one(prompt, tokenizer, vocab, "prompt", chat_template_kwargs)], False
    if not isinstance(prompt, list | tuple):
        raise TypeError(
            "prompt must be a str, a list of messages, token ids, or a list of these, got "
            f"{type(prompt).__name__}"
        )
    if not prompt:
        raise ValueError("prompt is an empty list")
    return [
        _one(p, tokenizer, vocab, f"prompt {i}", chat_template_kwargs)
        for i, p in enumerate(prompt)
    ], True


def has_chat(tokenizer: Any) -> bool:
    """Whether messages can be told to the tokenizer's model."""
    return getattr(tokenizer, "chat_template", None) is not None


def as_message(prompt: str | list[dict], chat: bool) -> str | list[dict]:
    """A text as what a user says, where `chat`; messages, and a text elsewhere, as they are."""
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, str) or torch.is_tensor(prompt):
        return True
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and (
        isinstance(prompt[0], Mapping) or _is_id(prompt[0])
    )


def _is_id(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _one(
    prompt: Any, tokenizer: Any, vocab: int, name: str, chat_template_kwargs: dict | None
) -> list[int]:
    if isinstance(prompt, str):
        return _check(_encode(prompt, tokenizer, name), vocab, name)
    if torch.is_tensor(prompt):
        if prompt.dim() != 1:
            raise ValueError(f"{name} must be a 1-D tensor of token ids, got {prompt.dim()}-D")
        if prompt.is_floating_point():
            raise TypeError(f"{name} must hold token ids, got dtype {prompt.dtype}")
        return _check(prompt.tolist(), vocab, name)
    if not isinstance(prompt, list | tuple):
        raise TypeError(
            f"{name} must be a str, a list of messages or token ids, got {type(prompt).__name__}"
        )
    if prompt and all(isinstance(m, Mapping) for m in prompt):
        return _check(_chat(prompt, tokenizer, name, chat_template_kwargs or {}), vocab, name)
    return _check(prompt, vocab, name)


def _encode(text: str, tokenizer: Any, name: str) -> list[int]:
    _need(tokenizer, name)
    if not text:
        raise ValueError(f"{name} is empty")
    # a text that already starts with the beginning token must not get a second one
    bos = getattr(tokenizer, "bos_token", None)
    return tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]


def _chat(messages: Iterable[Mapping], tokenizer: Any, name: str, kwargs: dict) -> list[int]:
    _need(tokenizer, name)
    if not has_chat(tokenizer):
        raise ValueError(f"{name} is a list of messages, but the tokenizer has no chat template")
    kwargs = {"add_generation_prompt": True, **kwargs}
    return tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, **kwargs
    )["input_ids"]


def _need(tokenizer: Any, name: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{name} is text, but there is no tokenizer: pass tokenizer= or token ids")


def _unpad(prompt: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        raise ValueError("a 2-D tensor of prompts needs attention_mask, which says what is padding")
    if attention_mask.shape != prompt.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(prompt.shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    return [row[keep.bool()].tolist() for row, keep in zip(prompt, attention_mask, strict=True)]


def _check(ids: list[int] | tuple, vocab: int, name: str) -> list[int]:
    if not len(ids):
        raise ValueError(f"{name} is empty")
    for i in ids:
        if not _is_id(i):
            raise TypeError(f"{name} must hold token ids, got {i!r}")
        if not 0 <= i < vocab:
            raise ValueError(f"{name} has token id {i}, outside the vocabulary of {vocab}")
    return list(ids)
