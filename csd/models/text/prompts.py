"""Conversion of users' prompts to token ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from csd.models.text.context import as_lists, is_id
from csd.models.text.messages import (
    as_mapping,
    check_chat,
    check_messages,
    check_template_options,
    forms,
    messages_of,
    text_of,
    warn_once,
)
from csd.utils.check import check, fits, shown
from csd.utils.files import naming


def parse(
    prompt: Any,
    tokenizer: Any,
    vocab: int,
    attention_mask: torch.Tensor | None = None,
    chat_template_kwargs: dict | None = None,
    context: int | None = None,
    errors: dict[int, Exception] | None = None,
) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether `prompt` was a list of prompts.

    One prompt is a str (taken as it is), a list of message dicts (through the tokenizer's chat
    template), or token ids as a list or 1-D tensor. A 2-D tensor is a batch; padded rows need
    `attention_mask`. A tokenizer's BatchEncoding stands for its `input_ids`, without the tokens
    that its `attention_mask` marks as padding. context: of the model; texts far beyond it are
    refused before they are tokenised, which takes seconds per megabyte. errors: if given, the
    error of a faulty prompt is written to it by index, and the prompt's list of token ids is empty.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        if attention_mask is not None:
            raise ValueError("attention_mask is part of a prompt that is a BatchEncoding")
        prompt = _unmasked(prompt["input_ids"], prompt.get("attention_mask"))
    if torch.is_tensor(prompt) and prompt.dim() == 2:
        rows = _unpad(prompt, attention_mask)
        if not rows:
            raise ValueError("prompt must have at least one row, got an empty tensor")
        return _each(rows, lambda row, name: _check(row, vocab, name), errors), True
    if attention_mask is not None:
        raise ValueError("attention_mask needs a 2-D tensor of prompts")

    _check_template_kwargs(chat_template_kwargs, prompt)
    options = chat_template_kwargs or {}
    read = partial(_one, tokenizer=tokenizer, vocab=vocab, options=options, context=context)
    if _is_one(prompt):
        return _each([prompt], lambda one, _: read(one, "prompt"), errors), False
    if not isinstance(prompt, list | tuple):
        expected = "a str, a list of messages, token ids, or a list of these"
        raise TypeError(f"prompt must be {expected}, got {type(prompt).__name__}")
    if not prompt:
        raise ValueError("prompt must not be an empty list")
    return _each(prompt, read, errors), True


def _each(
    prompts: Iterable, read: Callable[[Any, str], list[int]], errors: dict[int, Exception] | None
) -> list[list[int]]:
    """`read` of each prompt and its name; errors: as in `parse`."""
    encoded = []
    for i, prompt in enumerate(prompts):
        try:
            encoded.append(read(prompt, f"prompt {i}"))
        except (TypeError, ValueError) as error:
            if errors is None:
                raise
            errors[i] = error
            encoded.append([])
    return encoded


def has_chat(tokenizer: Any) -> bool:
    """True if the tokenizer has a template for messages."""
    return getattr(tokenizer, "chat_template", None) is not None


def as_message(prompt: str | list[dict], chat: bool) -> str | list[dict]:
    """A text as a user's message if `chat`; messages, and texts without `chat`, unchanged."""
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def _is_one(prompt: Any) -> bool:
    if not isinstance(prompt, list | tuple) or not prompt:
        return isinstance(prompt, str) or torch.is_tensor(prompt)
    return as_mapping(prompt[0]) is not None or is_id(prompt[0])


def _check_template_kwargs(value: Any, prompt: Any) -> None:
    if not value:
        return
    if not isinstance(value, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, got {shown(value)}")
    prompts = [prompt] if _is_one(prompt) else prompt
    if isinstance(prompts, list | tuple) and not any(messages_of(p) is not None for p in prompts):
        names = ", ".join(sorted(map(str, value)))
        raise ValueError(
            f"chat_template_kwargs needs a prompt of messages, got {names} without one"
        )


def _one(
    prompt: Any, name: str, *, tokenizer: Any, vocab: int, options: dict, context: int | None
) -> list[int]:
    if isinstance(prompt, str):
        _check_length(prompt, tokenizer, context, name)
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
    messages = messages_of(prompt)
    if messages is not None:
        options = check_template_options(options)
        return _check(chat_ids(messages, tokenizer, name, options, context), vocab, name)
    return _check(prompt, vocab, name)


def _encode(text: str, tokenizer: Any, name: str) -> list[int]:
    _need(tokenizer, name)
    if not text:
        raise ValueError(f"{name} must not be empty")
    # a text that already starts with the beginning token must not get a second one
    bos = getattr(tokenizer, "bos_token", None)
    with naming(name):
        check(text, str)
    with _no_panic(name):
        ids = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"]
    return _without_end(ids, text, tokenizer)


def _without_end(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Token ids without the end tokens that the tokenizer appends; those in the text stay.

    Behind an end token a model begins another text in place of going on with this one.
    """
    written, count, appended = text.rstrip(), 0, len(ids)
    ends = {
        getattr(tokenizer, f"{kind}_token_id", None): getattr(tokenizer, f"{kind}_token", None)
        for kind in ("eos", "sep")
    }
    while appended and (end := ends.get(ids[appended - 1])):
        appended -= 1
        if written.endswith(end):
            written, count = written[: -len(end)].rstrip(), count + 1
    if appended + count == len(ids):
        return ids
    left_out = (
        "the tokenizer ends a text with '%s': a prompt is continued, so the token is left out"
    )
    warn_once(left_out, str(ends[ids[-1]]))
    return ids[: appended + count]


def leading_specials(ids: list[int], tokenizer: Any) -> int:
    """Number of tokens that a prompt begins with and that its tokenizer puts before every text."""
    leading = {getattr(tokenizer, name, None) for name in ("bos_token_id", "cls_token_id")}
    if callable(tokenizer):
        # others such as [gMASK] and <sop> have no names
        leading |= {*tokenizer("")["input_ids"]}.intersection(
            getattr(tokenizer, "all_special_ids", ())
        )
    return next((i for i, token in enumerate(ids) if token not in leading), len(ids))


def truncate(ids: list[int], count: int, tokenizer: Any) -> list[int]:
    """The last `count` tokens of a longer prompt, behind its leading special tokens."""
    if len(ids) <= count:
        return ids
    leading = min(leading_specials(ids, tokenizer), count - 1)
    return ids[:leading] + ids[len(ids) - (count - leading) :]


def chat_ids(
    messages: list[dict], tokenizer: Any, name: str, options: dict, context: int | None = None
) -> list[int]:
    """Token ids of messages, not yet checked against the vocabulary. options: of the template."""
    _need(tokenizer, name)
    if not has_chat(tokenizer) and not options.get("chat_template"):
        raise ValueError(f"{name} is a list of messages, but the tokenizer has no chat template")
    with naming(name):
        check_messages(messages)
    for message in messages:
        _check_length(text_of(message), tokenizer, context, name)
    with naming(name):
        tried = list(forms(messages, tokenizer, options))
    raised = None
    for form in tried:
        try:
            with _no_panic(name):
                text = tokenizer.apply_chat_template(form, **options | {"tokenize": False})
                of_ids = options | dict(tokenize=True, return_dict=True)
                ids = tokenizer.apply_chat_template(form, **of_ids)["input_ids"]
            return _without_end(ids, text, tokenizer)
        # a template is a program, and may raise any exception
        except Exception as error:
            raised = raised or error
    raise ValueError(
        f"{name} cannot be rendered by the chat template: {type(raised).__name__}: {raised}"
    ) from raised


@contextmanager
def _no_panic(name: str) -> Iterator[None]:
    """Turns a panic of a tokenizer in Rust, which is no `Exception`, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name} makes the tokenizer panic: {error}") from error


def _check_length(text: object, tokenizer: Any, context: int | None, name: str) -> None:
    if context is None or not isinstance(text, str) or len(text) <= 64 * context:
        return
    vocab: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    # a tokenizer may join up to four characters before it looks for tokens
    longest = 4 * max(map(len, vocab), default=0)
    if vocab and len(text) > longest * context:
        raise ValueError(
            f"{name} has {len(text)} characters, but the model's context of {context} tokens has "
            f"room for at most {longest * context}"
        )


def check_prompt(prompt: Any, name: str) -> None:
    """Check a file's prompt: a text that is not blank, or messages. Raises ValueError."""
    if not check_chat(prompt, f"{name!r}") and not (fits(prompt, str) and prompt.strip()):
        raise ValueError(f"must have a string or messages as {name!r}, got {shown(prompt)}")


def _need(tokenizer: Any, name: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{name} is text, but there is no tokenizer: pass tokenizer= or token ids")


def _unpad(prompt: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        if len(prompt) == 1:
            # nothing is padded
            return prompt.tolist()
        raise ValueError("a 2-D tensor of prompts needs attention_mask, which marks its padding")
    if not torch.is_tensor(attention_mask):
        kind = type(attention_mask).__name__
        raise TypeError(f"attention_mask must be a 2-D tensor, got a {kind}")
    if prompt.is_floating_point():
        raise TypeError(f"prompt must hold token ids, got dtype {prompt.dtype}")
    if attention_mask.shape != prompt.shape:
        want, have = tuple(prompt.shape), tuple(attention_mask.shape)
        raise ValueError(f"attention_mask must have shape {want}, got {have}")
    return [row[keep.bool()].tolist() for row, keep in zip(prompt, attention_mask, strict=True)]


def _unmasked(ids: Any, mask: Any) -> Any:
    """The token ids of one or more texts without padding, as nested lists."""
    ids, mask = as_lists(ids), as_lists(mask)
    if mask is None:
        return ids
    if not len(ids) or not isinstance(ids[0], list | tuple):
        return [token for token, keep in zip(ids, mask, strict=True) if keep]
    return [_unmasked(row, row_mask) for row, row_mask in zip(ids, mask, strict=True)]


def _check(ids: list[int] | tuple, vocab: int, name: str) -> list[int]:
    if not len(ids):
        raise ValueError(f"{name} must not be empty")
    for i in ids:
        if not is_id(i):
            raise TypeError(f"{name} must hold token ids, got {shown(i)}")
        if not 0 <= i < vocab:
            raise ValueError(f"{name} has token id {shown(i)}, outside the vocabulary of {vocab}")
    return [int(i) for i in ids]
