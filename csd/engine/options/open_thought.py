"""Thoughts in which answers begin: which prompts leave one open, and where it ends.

Words of users, of system messages, of tools and of earlier turns may name a tag. So a tag of the
prompt counts in two places only: at the prompt's very end, and at the beginning of the answer that
the prompt begins, behind the header that the chat template writes in front of an answer.
"""

from collections.abc import Sequence
from typing import Any

from csd.engine.options.thinking import PAIRS, TAG, Tag, Tags, of_tokenizer
from csd.models.text.messages import check_template_options
from csd.models.text.prompts import chat_ids, has_chat
from csd.models.text.streamed import StopStrings

# begin and end tags as texts
Pairs = tuple[tuple[str, str], ...]


def leaves_thought_open(
    prompt: str, header: str = "", pairs: Pairs = PAIRS, answered: str = ""
) -> bool:
    """True if the text of a prompt leaves a thought open.

    header: `answer_header` of the tokenizer. pairs: tags of the thought. answered: what the answer
    has already behind the prompt, as in a session's later turns.
    """
    whole = prompt + answered
    begins = tuple(begin for begin, _ in pairs)
    # spaces may be a tag of their own
    if whole.endswith(begins) or whole.rstrip().endswith(begins):
        return True
    if header and header in (answered or prompt):
        return _begins_open(whole.rpartition(header)[2], pairs)
    if answered and leaves_thought_open(prompt, header, pairs):
        return not any(end in answered for _, end in pairs)
    return _begins_open(answered, pairs)


def _begins_open(answer: str, pairs: Pairs) -> bool:
    return any(answer.lstrip().startswith(begin) and end not in answer for begin, end in pairs)


def open_thoughts(
    prompt: Sequence[int], answered: int, tags: Tags | None, tokenizer: Any
) -> tuple[bool, bool]:
    """`leaves_thought_open` of token ids: by the tags of templates, and by `tags`.

    answered: number of tokens at the end that belong to the answer. Without a tokenizer there is no
    header, and no text of tags that are not given.
    """
    begin = [] if tags is None else [*tags[0]]
    ends = bool(begin) and [*prompt[-len(begin) :]] == begin
    if tokenizer is None:
        return False, ends
    first = max(len(prompt) - answered, 0)
    texts = [_decode(tokenizer, part) for part in (prompt[:first], prompt[first:])]
    header = answer_header(tokenizer)
    of_templates = leaves_thought_open(texts[0], header, answered=texts[1])
    if tags is None:
        return of_templates, False
    own = (_text(tags[0], tokenizer), _text(tags[1], tokenizer))
    opened = all(own) and leaves_thought_open(texts[0], header, (own,), texts[1])
    return of_templates, ends or opened


def _text(tag: Tag | tuple[int, ...], tokenizer: Any) -> str:
    if isinstance(tag, Tag) and tag.text is not None:
        return tag.text.decode()
    return _decode(tokenizer, [*tag])


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode([*ids], skip_special_tokens=False) if ids else ""


# a message's text, behind which a template's header stands
_WORD = "Lorem"


def answer_header(tokenizer: Any) -> str:
    """Text that the chat template writes between a user's message and the answer, up to a thought.

    Such as `<|im_end|>\\n<|im_start|>assistant`; "" if the tokenizer has no such template.
    """
    if not has_chat(tokenizer):
        return ""
    return _rendered_header(tokenizer, str(tokenizer.chat_template))


@of_tokenizer
def _rendered_header(tokenizer: Any, template: str) -> str:
    """The header of an answer; template: the chat template, by which results are kept."""
    messages = [{"role": "user", "content": _WORD}]
    try:
        ids = chat_ids(messages, tokenizer, "prompt", check_template_options({}))
        _, shown, behind = _decode(tokenizer, ids).rpartition(_WORD)
    # a template is a program, and may raise any exception
    except Exception:
        return ""
    return TAG.split(behind)[0].strip() if shown else ""


class Front:
    """The thought in front of an answer, as the text grows.

    pairs: tags of thoughts; empty if texts have none. opened: True if the prompt leaves it open.
    """

    def __init__(self, pairs: Pairs, opened: bool):
        self._pairs = pairs
        # end tags of the thought; None while it is open whether the text begins with one
        self._ends = [end for _, end in pairs] if opened and pairs else None
        self._at = 0

    def push(self, text: str, end: int) -> int | None:
        """Place of the answer in a text up to `end`; None before one has begun, as in a thought.

        The text begins with that of the last call, and no tag goes on behind `end`.
        """
        if self._ends is None:
            bare = text[:end].lstrip()
            begin = next((begin for begin, _ in self._pairs if bare.startswith(begin)), None)
            if begin is None:
                return 0
            self._ends = [own for tag, own in self._pairs if tag == begin]
            self._at = end - len(bare) + len(begin)
        places = [(at, tag) for tag in self._ends if (at := text.find(tag, self._at, end)) >= 0]
        self._at = end
        return min(places)[0] + len(min(places)[1]) if places else None

    def answer(self, text: str) -> int | None:
        """`push` of a text that may go on within a tag; None while it is open where it begins."""
        tags = StopStrings(tuple(tag for pair in self._pairs for tag in pair))
        end = len(text) - tags.open(text)
        return self.push(text, end) if self._ends is not None or text[:end].strip() else None
