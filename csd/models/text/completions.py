"""Token ids of the completions that a caller gives for scoring."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from csd.models.text.context import encode_behind
from csd.utils.check import shown


def read_completions(
    completions: Any, prompts: list[list[int]], many: bool, tokenizer: Any, vocab: int
) -> list[list[list[int]]]:
    """Token ids of every completion of every prompt. Raises ValueError for anything else.

    completions: a list of texts or token ids, or an array of ids with one row per completion; a
        list of these if there are `many` prompts.
    """
    listed = as_lists(completions)
    listed = listed if many else [listed]
    expected = "a list of texts or token ids" + (" for each prompt" if many else "")
    if isinstance(listed, str) or not isinstance(listed, Sequence) or len(listed) != len(prompts):
        raise ValueError(
            f"completions must be {expected}, {len(prompts)} in all, got {shown(listed)}"
        )
    token_ids = []
    for prompt, own in zip(prompts, map(as_lists, listed), strict=True):
        if isinstance(own, str) or not isinstance(own, Sequence) or not len(own):
            raise ValueError(f"completions must be {expected}, got {shown(own)}")
        token_ids.append([_ids(one, prompt, tokenizer, vocab) for one in own])
    return token_ids


def _ids(completion: Any, prompt: list[int], tokenizer: Any, vocab: int) -> list[int]:
    if isinstance(completion, str):
        if tokenizer is None:
            raise ValueError("completions that are strings need a tokenizer: pass tokenizer=")
        text = completion
        completion, joined = encode_behind(tokenizer, prompt, text)
        if joined:
            raise ValueError(
                "completions must be texts that the tokenizer separates from the prompt, but it "
                f"joins the prompt's end {joined!r} with {shown(text)}: move {joined!r} from the "
                "prompt to the beginning of each completion, or pass token ids"
            )
    completion = as_lists(completion)
    whole = isinstance(completion, list | tuple) and all(
        isinstance(t, Integral) and not isinstance(t, bool) for t in completion
    )
    if not whole or not completion:
        raise ValueError(
            f"completions must be lists of at least one token id, got {shown(completion)}"
        )
    if not 0 <= min(completion) <= max(completion) < vocab:
        raise ValueError(
            f"completions must lie in the vocabulary of {vocab}, got {shown(completion)}"
        )
    return [*map(int, completion)]


def as_lists(value: Any) -> Any:
    """A numpy array or torch tensor as lists; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
