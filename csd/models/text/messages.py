"""Conversion of OpenAI clients' messages to the form that a chat template reads.

Templates are programs that read different forms: texts or lists of parts, arguments of tools as
objects or as JSON, a missing content or an empty one. The form is chosen by rendering each.

Fields that a template leaves out are refused, or named once in the log.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, NotRequired, TypedDict

from csd.utils.check import AtLeast, check, fits, shown
from csd.utils.files import naming


class Message(TypedDict):
    """A message for a chat template: an assistant may have `tool_calls` in place of content."""

    role: str
    content: NotRequired[str | list | None]
    tool_calls: NotRequired[list[dict] | None]


Messages = Annotated[list[Message], AtLeast(1)]

# type of a content part that holds text -> key of the text
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# arguments of apply_chat_template that would return something other than all token ids
_OURS = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length")
# roles that a template may read without naming them
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_READS_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content")


def as_mapping(message: Any) -> Mapping | None:
    """A mapping, or an object of OpenAI's client, as a mapping; None for any other value."""
    if isinstance(message, Mapping):
        return message
    if hasattr(message, "role") and hasattr(message, "model_dump"):
        return message.model_dump(exclude_none=True)
    return None


def check_messages(messages: list[dict]) -> None:
    """Raises ValueError, naming the message, if one is invalid.

    A message needs a role, and a content or tool calls; all parts of a content must be text.
    """
    check(messages, Messages)
    for i, message in enumerate(messages):
        content = message.get("content")
        where = f"[{i}].content"
        if isinstance(content, list):
            for j, part in enumerate(content):
                _text_of(part, f"{where}[{j}]")
        if (content is None or content == []) and not message.get("tool_calls"):
            raise ValueError(f"must have a string as {where!r}, got {message}")


def text_of(message: Mapping) -> str:
    """Text of a checked message: its text parts, joined by newlines."""
    return "\n".join(_texts(message))


def check_template_options(options: dict) -> dict:
    """The arguments of a chat template, with `add_generation_prompt` set if it is missing.

    Raises TypeError or ValueError, naming the argument that cannot be served.
    """
    if not fits(list(options), list[str]):
        raise TypeError(
            f"chat_template_kwargs must be a dict with strings as keys, got {shown(options)}"
        )
    for name in _OURS:
        if name in options:
            raise ValueError(
                f"chat_template_kwargs must not have {name!r}, got {options[name]!r}: csd always "
                "asks the template for token ids"
            )
    continues = bool(options.get("continue_final_message"))
    if continues and options.get("add_generation_prompt"):
        both = "continue_final_message", "add_generation_prompt"
        values = " and ".join(repr(options[name]) for name in both)
        raise ValueError(
            f"chat_template_kwargs must not have both {' and '.join(both)}, got {values}"
        )
    return {"add_generation_prompt": not continues} | options


def forms(messages: Sequence[Mapping], tokenizer: Any, options: dict) -> Iterator[list[dict]]:
    """Yield checked messages in the form that the tokenizer's template reads.

    Further forms follow, for a template that raises for the earlier ones.

    Raises ValueError for a message that the template would leave out.
    """
    template = str(options.get("chat_template") or getattr(tokenizer, "chat_template", None))

    def render(form: list[dict]) -> str | None:
        try:
            text = tokenizer.apply_chat_template(form, **options | {"tokenize": False})
        # a template is a program, and may raise any exception
        except Exception:
            return None
        return text if isinstance(text, str) else None

    _check_roles(messages, template)
    plain = [_without_none(m) for m in messages]
    if "developer" not in template:
        # name of system messages for OpenAI's newer models
        plain = [m | {"role": "system"} if m["role"] == "developer" else m for m in plain]
    plain = _with_read_contents(plain, template, render)
    # with an empty content in place of none too, for templates that join texts
    tried = [plain, [m if "content" in m else m | {"content": ""} for m in plain]]
    if any("tool_calls" in m for m in plain):
        tried = [
            _with_arguments(form, convert)
            for convert in (_as_object, _as_object_of_texts, _as_text)
            for form in tried
        ]
    tried = [form for i, form in enumerate(tried) if form not in tried[:i]]
    # rendered forms, with all fields, with arguments as JSON and not as Python
    ranked = []
    for form in tried:
        text = render(form)
        lost = left_out(form, text, render)
        rank = text is None, len(lost), text is not None and _shows_python(form, text)
        ranked.append((rank, lost, form))
        if rank == (False, 0, False):
            break
    ranked.sort(key=itemgetter(0))
    refuse_left_out(ranked[0][2], ranked[0][1])
    yield from (form for _, _, form in ranked)


def _check_roles(messages: Sequence[Mapping], template: str) -> None:
    """Raises ValueError for a role that is neither common nor named by the template.

    A template that writes any role would show a misspelled one to the model.
    """
    for i, message in enumerate(messages):
        role = message["role"]
        if role in ROLES:
            continue
        if not role or not re.search(rf"""['"]{re.escape(role)}['"]""", template):
            raise ValueError(
                f"must have roles of {', '.join(ROLES)}, or that the chat template names, got "
                f"{shown(role)} as '[{i}].role'"
            )


def _without_none(message: Mapping) -> dict:
    """A message with only the texts of its parts, and without keys whose value is None."""
    fields = {key: value for key, value in message.items() if value is not None}
    if fields.get("content") == []:
        del fields["content"]
    if isinstance(fields.get("content"), list):
        fields["content"] = [{"type": "text", "text": text} for text in _texts(message)]
    return fields


def _with_read_contents(messages: list[dict], template: str, render: Any) -> list[dict]:
    """Messages with contents as texts or as lists of parts, whichever the template shows whole."""
    lists = any(isinstance(m.get("content"), list) for m in messages)
    if not lists and not _READS_PARTS.search(template):
        return messages
    joined = [m | {"content": text_of(m)} if "content" in m else m for m in messages]
    wrapped = [
        m | {"content": [{"type": "text", "text": m["content"]}]} if "content" in m else m
        for m in joined
    ]
    texts = [text.strip() for m in messages for text in _texts(m)]
    as_text, as_part = render(joined), render(wrapped)
    if as_part is None:
        return joined
    lost = _lost(texts, as_text)
    if as_part == as_text:
        parts = messages
    elif _lost(texts, as_part) < lost and not re.search(r"""['"]type['"]: ['"]text""", as_part):
        parts = [
            m if isinstance(m.get("content"), list) else one
            for m, one in zip(messages, wrapped, strict=True)
        ]
        joined = wrapped
    else:
        return joined
    # join the parts if the template reads only the first of several
    return parts if _lost(texts, render(parts)) <= _lost(texts, as_part) else joined


def _lost(texts: list[str], rendered: str | None) -> int:
    """Number of texts that `rendered` lacks; one more than all of them for None."""
    return len(texts) + 1 if rendered is None else sum(text not in rendered for text in texts)


def _with_arguments(messages: list[dict], convert: Callable[[Any], Any]) -> list[dict]:
    def read(call: dict) -> dict:
        function = call.get("function")
        if not isinstance(function, Mapping) or function.get("arguments") is None:
            return call
        return call | {"function": {**function, "arguments": convert(function["arguments"])}}

    return [
        m | {"tool_calls": [read(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def _as_object(arguments: Any) -> Any:
    """A call's arguments as an object, parsed from the clients' JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _as_object_of_texts(arguments: Any) -> Any:
    """The same with JSON text in place of each object or list in it, for templates that join."""
    value = _as_object(arguments)
    if not isinstance(value, dict):
        return value
    return {k: _as_text(x) if isinstance(x, dict | list) else x for k, x in value.items()}


def _as_text(arguments: Any) -> str:
    """A call's arguments as JSON text; that of a client unchanged."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _shows_python(messages: list[dict], rendered: str) -> bool:
    """True if `rendered` has an object or a list of a tool call's arguments as Python's repr."""
    calls = (call for m in messages for call in m.get("tool_calls", ()))
    functions = (call.get("function") for call in calls)
    containers = _containers([f.get("arguments") for f in functions if isinstance(f, Mapping)])
    return any(repr(x) in rendered and repr(x) != _as_text(x) for x in containers)


def _containers(values: Iterable) -> Iterator[dict | list]:
    for value in values:
        if isinstance(value, dict | list):
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)


def _texts(message: Mapping) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [_text_of(part, "content") for part in content]
    return [] if content is None else [content]


def _text_of(part: Any, where: str) -> str:
    """Text of a part of a content. Raises ValueError for a part that is not text."""
    if not isinstance(part, Mapping):
        raise ValueError(
            "does not fit the chat template: it must have parts such as {'type': 'text', 'text': "
            f"...}} as {where!r}, got {shown(part)}"
        )
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise ValueError(
            f"must have parts of type 'text' as {where!r}, got type {shown(kind)}: csd supports "
            "text only"
        )
    text = part.get(_TEXTS[kind])
    if not fits(text, str):
        raise ValueError(f"must have a string as '{where}.{_TEXTS[kind]}', got {shown(text)}")
    return str(text)


def messages_of(prompt: Any) -> list[dict] | None:
    """The messages of a prompt; None for a prompt of another kind."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return None
    mappings = [as_mapping(message) for message in prompt]
    return None if None in mappings else [dict(m) for m in mappings if m is not None]


def check_chat(prompt: Any, name: str) -> bool:
    """True if a prompt is messages. Raises ValueError, naming it, for invalid messages."""
    messages = messages_of(prompt)
    if messages is None:
        return False
    with naming(name):
        check_messages(messages)
    return True


LOG = logging.getLogger("csd")

Path = tuple[str | int, ...]
# renders messages; None where the template raises
Render = Callable[[list[dict]], str | None]

# keys whose values link or classify, and are no words
_LABELS = frozenset({"role", "type", "id", "index", "tool_call_id"})


def left_out(messages: list[dict], text: str | None, render: Render) -> list[Path]:
    """Paths of the fields with words that do not change the rendered `text` when they change.

    All fields are changed in one rendering, and those that do not appear in it again in others.
    """
    if text is None:
        return []
    marks = {path: f"field{i}mark" for i, path in enumerate(_words(messages))}
    together = render(_changed(messages, marks)) or ""
    hidden = [path for path, mark in marks.items() if mark not in together]
    return _without_effect(hidden, messages, text, render)


def _without_effect(
    paths: list[Path], messages: list[dict], text: str, render: Render
) -> list[Path]:
    """The fields, of some, that do not change the rendered text, by bisection."""
    if not paths or render(_changed(messages, dict.fromkeys(paths, "mark"))) == text:
        return paths
    if len(paths) == 1:
        return []
    middle = len(paths) // 2
    first = _without_effect(paths[:middle], messages, text, render)
    return first + _without_effect(paths[middle:], messages, text, render)


def refuse_left_out(messages: list[dict], paths: list[Path]) -> None:
    """Raises ValueError for a content, and for a tool call, that the template leaves out.

    Other fields, parts of a shown call, and the content beside one are named in the log.
    """
    lost, words = set(paths), [*_words(messages)]
    for path in paths:
        index, field = int(path[0]), str(path[1])
        role = messages[index]["role"]
        calls = [p for p in words if p[:2] == (index, "tool_calls")]
        call = [p for p in calls if p[:3] == path[:3]]
        if field == "content" and role not in ("user", "assistant"):
            raise ValueError(
                f"must have roles that the chat template supports, got {role!r} as "
                f"'[{index}].role', whose message it leaves out"
            )
        if lost.issuperset(calls if field == "content" else call) and (call or field == "content"):
            raise ValueError(
                f"must have fields that the chat template shows, got '{_named(path)}', which it "
                "leaves out: write these words in the content of a message that it shows, or pass "
                "a template that shows them as chat_template_kwargs={'chat_template': ...}"
            )
        names = ".".join(key for key in path[1:] if isinstance(key, str))
        text = "the chat template leaves out %r of a message of role %r, so no model reads it"
        warn_once(text, names, str(role))


@lru_cache(maxsize=1024)
def warn_once(message: str, *arguments: str) -> None:
    """Write a line to the log, unless it was written before."""
    LOG.warning(message, *arguments)


def _words(value: Any, path: Path = (), argument: bool = False) -> Iterator[Path]:
    """Paths of the values in messages that carry words, or arguments of tools."""
    # empty arguments are values too: they show a call whose name is not shown
    if isinstance(value, dict) and (value or not argument):
        for key, inner in value.items():
            if argument or key not in _LABELS:
                yield from _words(inner, (*path, key), argument or key == "arguments")
    elif isinstance(value, list) and (value or not argument):
        for i, inner in enumerate(value):
            yield from _words(inner, (*path, i), argument)
    elif argument or (isinstance(value, str) and value.strip()):
        yield path


def _changed(messages: list[dict], marks: dict[Path, str]) -> list[dict]:
    """Messages with a word appended to each of these texts, or in the place of another value."""
    changed = copy.deepcopy(messages)
    for path, mark in marks.items():
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        value = parent[path[-1]]
        if isinstance(value, dict):
            parent[path[-1]] = {mark: mark}
        else:
            parent[path[-1]] = f"{value} {mark}" if isinstance(value, str) else mark
    return changed


def _named(path: Path) -> str:
    """A path as in an error: [1].tool_calls[0].function.name."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
