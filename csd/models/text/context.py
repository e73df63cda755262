"""Text of tokens that stand behind a prompt, and tokens of such texts, as callers give them.

A decoder may strip a text's first space, join several tokens to one character and leave special
tokens out, and an encoder joins neighbours. So a text is decoded and encoded with the end of the
prompt in front of it, which is taken off again:

    decode(prompt + tokens) == decode(prompt) + text

A character that begins in the prompt and ends in the tokens belongs to the text: then the two sides
agree without the incomplete character at the prompt's end.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from csd.models.text.token_bytes import token_bytes
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
    if (
        not isinstance(completion, list | tuple)
        or not completion
        or not all(map(is_id, completion))
    ):
        expected = "be lists of at least one token id"
    elif not 0 <= min(completion) <= max(completion) < vocab:
        expected = f"lie in the vocabulary of {vocab}"
    else:
        return [*map(int, completion)]
    raise ValueError(f"completions must {expected}, got {shown(completion)}")


def is_id(x: object) -> bool:
    """True for an int, or an integer of numpy, that is no bool."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def as_lists(value: Any) -> Any:
    """A numpy array or torch tensor as lists; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


# characters at a text's end that transformers' clean-up of spaces may still change
OPEN = 8
# visible characters of a prompt's end that decide how the text behind it is decoded
_ENOUGH = 2 * OPEN


class TextContext:
    """The end of a prompt, behind which tokens are decoded."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._bytes = token_bytes(tokenizer)
        special = getattr(tokenizer, "all_special_ids", None) if skip_special_tokens else None
        self._skipped = frozenset(special or ())
        # characters at the end of a text that the next tokens may change
        self.open = OPEN if _cleans(tokenizer) else 0
        self.tokens, self.before = self._end(prompt)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens behind the prompt."""
        if not self.tokens:
            return self.decode(tokens)
        both = self.decode([*self.tokens, *tokens])
        return both[shared(self.before, both) :]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens without a prompt."""
        return self._tokenizer.decode([*tokens], skip_special_tokens=self._skip)

    def in_run(self, token: int) -> bool:
        """True if the token is a byte, whose text depends on the whole run of bytes around it."""
        return self._bytes.is_byte(token)

    def ends_run(self, token: int) -> bool:
        """True if no byte before the token is in a run with one after it."""
        return token not in self._skipped and not self.in_run(token)

    def _end(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens of a prompt that decide about the text behind it, and their text."""
        size = 8
        while True:
            start = max(len(prompt) - size, 0)
            while start and not self.ends_run(prompt[start]):
                start -= 1
            tokens = [*prompt[start:]]
            text = self.decode(tokens) if tokens else ""
            if not start or len(text.strip(" \n\t\ufffd")) >= _ENOUGH:
                return tokens, text
            size *= 4


def encode_behind(tokenizer: Any, prompt: Sequence[int], text: str) -> tuple[list[int], str]:
    """Token ids of a text behind a prompt, and the prompt's end that the tokenizer joins with it.

    If that end is not empty, no tokens behind this prompt are those of the joined text, and there
    are none to return.
    """
    context = TextContext(tokenizer, prompt, skip_special_tokens=False)
    before = context.before

    def encode(whole: str) -> list[int]:
        return tokenizer(whole, add_special_tokens=False)["input_ids"] if whole else []

    alone, joined = encode(before), encode(before + text)
    same = shared(alone, joined)
    if same == len(alone):
        return joined[same:], ""
    end = TextContext(tokenizer, alone[:same], skip_special_tokens=False).text(alone[same:])
    return [], end or before


def shared(before: Sequence, after: Sequence) -> int:
    """Number of characters or tokens that two sequences have in common at their beginning."""
    if after[: len(before)] == before:
        return len(before)
    pairs = zip(before, after, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))


def _cleans(tokenizer: Any) -> bool:
    """True if decoded texts lose spaces, such as those in front of commas."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    # transformers 5 ignores the setting for BPE, unless another one insists
    insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return type(model).__name__ != "BPE" or getattr(tokenizer, insists, True)
