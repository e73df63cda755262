"""Chats and templates at random: each field is in the prompt, or is named."""

import json
import logging

import pytest
from helpers.runs.fuzzing import examples
from hypothesis import event, given
from hypothesis import strategies as st

from csd.models.demo import toy
from csd.models.text.messages import warn_once
from csd.models.text.prompts import parse

_, TOKENIZER = toy()
# how a template may show a field of a message, of a tool call, and a call's arguments
MESSAGE = {
    "content": "({{ m.content if m.content is defined and m.content else '' }})",
    "name": "{{ m.name }}",
    "reasoning_content": "{{ m.reasoning_content }}",
}
ARGUMENTS = {
    "tojson": "{{ f.arguments | tojson }}",
    "joins": "{{ '' + f.arguments }}",
    "prints": "{{ f.arguments }}",
    "only texts": "{% if f.arguments is string %}{{ f.arguments }}{% endif %}",
    "only objects": "{% if f.arguments is mapping %}{{ f.arguments | tojson }}{% endif %}",
    "nothing": "",
}
WORDS = st.text("abcXYZ 019'", min_size=1, max_size=8).filter(str.strip)
VALUES = st.recursive(
    WORDS | st.integers(0, 99) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=3,
)


@st.composite
def chats(draw):
    messages = [{"role": "user", "content": draw(WORDS)}]
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "assistant", "system", "tool"]))
        message = {"role": role, "content": draw(WORDS)}
        if draw(st.booleans()):
            message[draw(st.sampled_from(["name", "reasoning_content"]))] = draw(WORDS)
        if role == "assistant" and draw(st.booleans()):
            arguments = draw(st.dictionaries(WORDS, VALUES, max_size=3))
            if draw(st.booleans()):
                arguments = json.dumps(arguments)
            message["tool_calls"] = [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": draw(WORDS), "arguments": arguments},
                }
            ]
            if draw(st.booleans()):
                del message["content"]
        messages.append(message)
    return messages


@st.composite
def templates(draw):
    """Pieces of a template, by the field that they show."""
    fields = draw(st.sets(st.sampled_from([*MESSAGE])))
    return {
        # most of them show the contents of every role, so that most chats are rendered
        "fields": fields | {"content"} if draw(st.integers(0, 7)) else fields,
        "roles": ("system", "tool", "user", "assistant")[0 if draw(st.integers(0, 7)) else 2 :],
        "call": draw(st.booleans()),
        "arguments": draw(st.sampled_from([*ARGUMENTS])),
    }


def text_of(template):
    call = "{{ f.name }}:" * template["call"] + ARGUMENTS[template["arguments"]]
    body = "".join(MESSAGE[field] for field in sorted(template["fields"]))
    body += "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}"
    roles = " or ".join(f"m.role == '{role}'" for role in template["roles"])
    return f"{{% for m in messages %}}{{% if {roles} %}}<{body}>{{% endif %}}{{% endfor %}}"


@given(chats(), templates())
@examples(200, 10_000)
def test_each_field_is_in_the_prompt_or_is_named(chat, template):
    TOKENIZER.chat_template = text_of(template)
    warn_once.cache_clear()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("csd").addHandler(handler)
    try:
        (ids,), _ = parse(chat, TOKENIZER, len(TOKENIZER))
    except ValueError as error:
        event("refused")
        named = str(error)
        assert "content" in named or "tool_calls" in named or ".role" in named
        assert refusals(chat, template), named
        return
    finally:
        logging.getLogger("csd").removeHandler(handler)
    event("rendered")
    assert not refusals(chat, template)
    prompt = TOKENIZER.decode(ids)
    for message in chat:
        shown = message["role"] in template["roles"]
        for field in ("content", "name", "reasoning_content"):
            if field in message:
                here = shown and field in template["fields"]
                assert message[field] in prompt if here else named_in(lines, field, message)
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            assert name in prompt if template["call"] else named_in(lines, "function.name", message)
            if template["arguments"] != "nothing":
                given = json.loads(arguments) if isinstance(arguments, str) else arguments
                assert any(spelling in prompt for spelling in spellings(given, arguments))
            elif arguments not in ({}, "{}"):
                assert named_in(lines, "function.arguments", message)


def spellings(given, sent):
    """JSON of arguments: as it was sent, as templates write it, and of an object's values alone."""
    inner = {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in given.items()}
    return {
        json.dumps(given),
        # what Jinja's tojson escapes for HTML is not escaped by transformers'
        json.dumps(inner),
        sent if isinstance(sent, str) else json.dumps(sent),
        # of equal spelling as Python's
        *[repr(value) for value in (given, inner) if repr(value) == json.dumps(value)],
    }


def named_in(lines, field, message):
    return any(f"{field}" in line and f"'{message['role']}'" in line for line in lines)


def refusals(chat, template):
    """Messages and calls that leave no trace."""
    found = []
    for i, message in enumerate(chat):
        shown = message["role"] in template["roles"]
        calls = message.get("tool_calls", [])
        traces = shown and (template["call"] or template["arguments"] != "nothing")
        if calls and not traces:
            found.append((i, "tool_calls"))
        if (
            "content" in message
            and not (shown and "content" in template["fields"])
            and (message["role"] not in ("user", "assistant") or not (calls and traces))
        ):
            found.append((i, "content"))
    return found


@pytest.mark.parametrize("field", ["name", "reasoning_content"])
def test_a_field_is_named_once(field, caplog):
    TOKENIZER.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    warn_once.cache_clear()
    for _ in range(3):
        parse([{"role": "user", "content": "a", field: "b"}], TOKENIZER, len(TOKENIZER))
    assert [record.getMessage() for record in caplog.records] == [
        f"the chat template leaves out '{field}' of a message of role 'user', so no model reads it"
    ]
