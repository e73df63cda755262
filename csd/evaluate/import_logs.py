"""Conversion of other systems' logs to traces: prompts with several completions each."""

from collections.abc import Iterable, Iterator
from typing import Any

from csd.models.text.context import TextContext, encode_behind
from csd.models.text.prompts import as_message, has_chat, parse
from csd.traces.traces import Trace
from csd.utils.arguments import check_ids, check_number
from csd.utils.check import shown
from csd.utils.files import naming

# keys of lists of completions: OpenAI's and others' logs, OpenAI's API responses, vLLM's outputs
_LISTS = ("completions", "choices", "outputs")
_PROMPTS = ("prompt_token_ids", "messages", "prompt", "question", "problem")


def traces_of(
    rows: Iterable[tuple[int, dict]],
    tokenizer: Any,
    *,
    temperature: float = 1.0,
    plain: bool = False,
) -> Iterator[Trace]:
    """Yields a trace for each row (line number, object).

    A prompt is `prompt_token_ids`, `messages`, or a text under `prompt`, `question` or `problem`;
    a text is a user's message if the tokenizer has a chat template, unless `plain`. Completions are
    a list under `completions`, `choices` or `outputs`: texts, token ids, or objects with
    `token_ids`, `text` or a `message`. Texts are tokenised behind
    the prompt and get the end token, since a log has neither; token ids are used unchanged.

    temperature: for rows without one. Raises ValueError, naming the line, for any other row.
    """
    chat = has_chat(tokenizer) and not plain
    for number, row in rows:
        with naming(f"line {number}"):
            yield _trace(row, number - 1, tokenizer, chat, temperature)


def _trace(row: dict, problem: int, tokenizer: Any, chat: bool, temperature: float) -> Trace:
    field = next((name for name in _PROMPTS if row.get(name) is not None), None)
    if field is None:
        raise ValueError(f"must have one of {', '.join(_PROMPTS)}, got {sorted(row)}")
    field_of_list = next((name for name in _LISTS if row.get(name) is not None), None)
    if field_of_list is None or not isinstance(row[field_of_list], list) or not row[field_of_list]:
        raise ValueError(f"must have a list of completions under {', '.join(_LISTS)}")
    prompt = row[field]
    if isinstance(prompt, str):
        prompt = as_message(prompt, chat)
    try:
        ids = parse(prompt, tokenizer, len(tokenizer))[0][0]
    except TypeError as error:
        raise ValueError(str(error)) from error
    samples = [_tokens(each, ids, tokenizer) for each in row[field_of_list]]
    own_temperature = row.get("temperature", temperature)
    return Trace(problem, ids, samples, check_number("temperature", own_temperature, 0), None)


def _tokens(completion: Any, prompt: list[int], tokenizer: Any) -> list[int]:
    if isinstance(completion, dict):
        message = completion.get("message")
        text = message.get("content") if isinstance(message, dict) else completion.get("text")
        completion = completion.get("token_ids") or text
    if isinstance(completion, str):
        ids = _behind(prompt, completion, tokenizer)
        # a log does not show which samples were cut, so each gets the end token
        end = tokenizer.eos_token_id
        ids = ids if end is None else [*ids, end]
    else:
        try:
            ids = check_ids("completions", completion, 1 << 22, len(tokenizer))
        except TypeError:
            ids = []
    if not ids:
        raise ValueError(f"must have completions of a string or token ids, got {shown(completion)}")
    return ids


def _behind(prompt: list[int], text: str, tokenizer: Any) -> list[int]:
    ids, joined = encode_behind(tokenizer, prompt, text)
    if not joined:
        return ids
    # the model began behind the prompt's last token, whatever the tokenizer joins
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if TextContext(tokenizer, prompt, skip_special_tokens=False).text(ids) != text:
        raise ValueError(
            f"must have completions that the tokenizer separates from the prompt, but it joins the "
            f"prompt's end {joined!r} with {shown(text)}: give their token_ids"
        )
    return ids
