"""Texts with calls: any arguments, words and thoughts, in each format, whole and in pieces."""

import asyncio
import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.runs.fuzzing import examples
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from csd.engine.options.thinking import PAIRS
from csd.engine.results.result import Sample
from csd.models.demo import toy
from csd.serve import Piece
from csd.serve.http.api import events
from csd.serve.http.api.calls.forms import FORMS
from csd.serve.http.api.calls.streams import merged
from csd.serve.http.api.request import Asked
from csd.serve.http.api.response import HttpAnswer
from csd.serve.http.api.responses import ResponseAnswer, response_events
from csd.serve.http.api.tools import Tools, read_tools

NAMES = ("add", "write_file", "a.b-c")
# texts that begin or end a part of one of the formats
SNIPPETS = [
    *(tag for pair in PAIRS[:2] for tag in pair),
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=x>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<", "[", "{", "}", '"', "\\"),
    *('{"name": "add", "arguments": {}}', "add", ";", "\n", " ", "é", "\u2028", "\x01", "```"),
]
letters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(letters, max_size=5), max_size=6).map("".join)
numbers = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)
# words in which no call and no thought begins
words = st.text("ab .,é\n\t", max_size=8)


def pieces_of(data, text):
    """The text cut at any places."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(tools, pieces, prompt=""):
    stream = tools.stream(prompt)
    deltas = [delta for piece in pieces for delta in stream.push(piece, False)]
    deltas += stream.push("", True)
    message, calls = merged(deltas)
    assert stream.calls == len(calls)
    return message, calls


def as_json(data, value):
    """JSON of a value as a model may write it: any spaces, escapes, and raw line breaks."""
    text = json.dumps(
        value,
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 1])),
        separators=data.draw(st.sampled_from([(", ", ": "), (",", ":")])),
    )
    return text.replace(r"\n", "\n") if data.draw(st.booleans()) and r"\\n" not in text else text


def as_object(data, name, value, key="arguments"):
    """A call as JSON, with its arguments as an object or as a text that has one."""
    source = as_json(data, value)
    if data.draw(st.booleans()):
        source = json.dumps(source)
    elif not value and data.draw(st.booleans()):
        source = "null"
    members = [f'"name": "{name}"', f'"{key}": {source}']
    return "{" + ", ".join(members[:: data.draw(st.sampled_from([1, -1]))]) + "}"


def hermes(data, calls):
    """Texts of calls; the last may have no end tag."""
    listed = []
    for i, (name, value) in enumerate(calls):
        space = data.draw(st.sampled_from(["", "\n"]))
        end = "" if i + 1 == len(calls) and data.draw(st.booleans()) else space + "</tool_call>"
        listed.append(f"<tool_call>{space}{as_object(data, name, value)}{end}")
    return listed


def qwen3_coder(data, calls):
    listed = []
    for i, (name, value) in enumerate(calls):
        begin = data.draw(st.sampled_from(["<tool_call>\n", "<tool_call>", ""]))
        end = "\n</tool_call>" if begin or i + 1 < len(calls) else ""
        body = "".join(
            f"<parameter={key}>\n{one if isinstance(one, str) else as_json(data, one)}\n"
            "</parameter>\n"
            for key, one in value.items()
        )
        listed.append(f"{begin}<function={name}>\n{body}</function>{end}")
    return listed


def mistral(data, calls):
    if data.draw(st.booleans()):
        objects = ", ".join(as_object(data, *call) for call in calls)
        return [f"[TOOL_CALLS] [{objects}]"]
    marks = st.sampled_from(["[ARGS]", "", "[CALL_ID]abcDEF123[ARGS]"])
    return [f"[TOOL_CALLS]{n}{data.draw(marks)}{as_json(data, value)}" for n, value in calls]


def llama3_json(data, calls):
    objects = [as_object(data, name, value, "parameters") for name, value in calls]
    return ["<|python_tag|>" * data.draw(st.booleans()) + "; ".join(objects)]


RENDER = {f.__name__: f for f in (hermes, qwen3_coder, mistral, llama3_json)}
assert RENDER.keys() == FORMS.keys()
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
TYPES |= {dict: "object", list: "array"}
# parts of XML: names in a tag, and strings whose own tags do not read as the end of a parameter
keys = st.text("abx_-. é", min_size=1, max_size=5).map(str.strip).filter(bool)
ENDED = re.compile(r"</parameter>\s*(<parameter=|</function>|</tool_call>)")


def drawn_calls(data, form):
    """Schemas of tools, and calls of them."""
    calls, schemas = [], {name: {} for name in NAMES}
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        value = data.draw(arguments)
        if form == "qwen3_coder":
            value = data.draw(st.dictionaries(keys, values, max_size=3))
            assume(not any(isinstance(one, str) and ENDED.search(one) for one in value.values()))
            types = {key: {"type": TYPES[type(one)]} for key, one in value.items()}
            schemas[name] = {"type": "object", "properties": types}
        calls.append((name, value))
    return schemas, calls


def drawn_thought(data):
    """A thought in front of a text, and the end of its prompt."""
    kind = data.draw(st.sampled_from(["none", "own", "opened"]))
    if kind == "none":
        return "", ""
    begin, end = data.draw(st.sampled_from(PAIRS))
    thought = data.draw(texts) + "\n"
    assume(not any(tag in thought for _, tag in PAIRS))
    if kind == "opened":
        return f"{thought}{end}", f"assistant\n{begin}\n"
    return f"{begin}{thought}{end}", "assistant\n"


def joined(before, listed, between):
    """A text of calls and words, and its content."""
    text, content = before, before.rstrip()
    for one, more in zip(listed, between, strict=True):
        text += one + more
        content += more.rstrip() if content else more.strip()
    return text, content


def same(calls, wanted):
    """True if the arguments are those that were written, and strict JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    read = [(name, json.loads(text, parse_constant=refuse)) for name, text in calls]
    return repr(read) == repr(wanted)


@pytest.mark.parametrize("form", FORMS)
@examples(12, 3000)
@given(data=st.data())
def test_calls_are_read_as_they_were_written(form, data):
    schemas, wanted = drawn_calls(data, form)
    thought, prompt = drawn_thought(data)
    before = "" if form == "llama3_json" else data.draw(words)
    behind = data.draw(words)
    listed = RENDER[form](data, wanted)
    between = [data.draw(words) for _ in listed[1:]] + [behind]
    text, content = joined(thought + before, listed, between)
    tools = Tools(schemas, "auto", form)
    message, calls = streamed(tools, pieces_of(data, text), prompt)
    assert same(calls, wanted), (text, calls)
    assert message == {"content": content or None}
    assert merged(tools.stream(prompt).push(text, True)) == (message, calls)


@pytest.mark.parametrize("choice", ["required", *NAMES[:1]])
@examples(12, 3000)
@given(data=st.data())
def test_texts_of_a_grammar_are_the_calls(choice, data):
    thinks = data.draw(st.booleans())
    thought, prompt = drawn_thought(data) if thinks else ("", "<think>\n")
    tools = Tools({name: {} for name in NAMES}, choice, "hermes", tags=PAIRS if thinks else ())
    if choice == "required":
        _, wanted = drawn_calls(data, "hermes")
        objects = [f'{{"name": "{n}", "arguments": {json.dumps(x)}}}' for n, x in wanted]
        answer = f"[{', '.join(objects)}]"
    else:
        wanted = [(choice, data.draw(arguments))]
        answer = json.dumps(wanted[0][1], indent=data.draw(st.sampled_from([None, 2])))
    text = thought + data.draw(st.sampled_from(["", " ", "\n\n"])) + answer
    message, calls = streamed(tools, pieces_of(data, text), prompt)
    assert same(calls, wanted), (text, calls)
    assert message == {"content": thought.rstrip() or None}
    assert merged(tools.stream(prompt).push(text, True)) == (message, calls)


@pytest.mark.parametrize("choice", ["auto", "required", *NAMES[:1]])
@examples(12, 3000)
@given(data=st.data())
def test_any_text_is_the_same_in_pieces(choice, data):
    form = data.draw(st.sampled_from([None, *FORMS]))
    tags = data.draw(st.sampled_from([(), PAIRS, (("<|begin of thought|>", "<|end|>"),)]))
    tools = Tools({name: {} for name in NAMES}, choice, form, tags=tags)
    more = st.sampled_from(["<|begin of thought|>", "<|end|>", "<tool_call>{", "<function=add>"])
    text = "".join(data.draw(st.lists(texts | more, max_size=6)))
    prompt = data.draw(st.sampled_from(["", "<think>", "<|begin of thought|>\n"]))
    message, calls = streamed(tools, pieces_of(data, text), prompt)
    assert merged(tools.stream(prompt).push(text, True)) == (message, calls)
    if not calls:
        # nothing of it is lost
        assert message == {"content": text}
    if choice != NAMES[0]:
        for _, source in calls:
            assert isinstance(json.loads(source), dict)
            source.encode()


class Served:
    """Answers of both endpoints to a request whose one choice has a text."""

    def __init__(self, tools, text, pieces, prompt):
        self.text, self.pieces = text, pieces
        sample = Sample(0, text, [5], [0.0], [0.0], "stop", 1)
        stats = SimpleNamespace(
            cached_tokens=0, sample_steps=1, tokens=1, nodes_proposed=0, accepted={}
        )
        progress = SimpleNamespace(finished={0: sample}, stats=stats, errors={})
        request = SimpleNamespace(samples=range(1), progress=progress)
        self.handle = SimpleNamespace(
            request=request, prompt_ids=[7], fingerprint="", seed=0, weights=0
        )
        self.asked = Asked(True, ["p"], {}, tools=tools, handles=[self.handle])
        self.texts = SimpleNamespace(decode=lambda ids, skip=False: prompt, header="")
        self.sample = sample

    async def news(self, handles):
        for piece in self.pieces:
            yield self.handle, [Piece(0, piece, [5])]
        yield self.handle, [Piece(0, sample=self.sample)]

    def chat(self):
        """The message and finish reason, whole and put together from the stream's events."""
        answer = HttpAnswer(self.asked, "toy", self.texts)
        (choice,) = answer.whole([[self.sample]])["choices"]
        deltas, reason = [], None
        for event in self.events(events.events(answer))[:-1]:
            (part,) = json.loads(event.removeprefix("data: "))["choices"]
            deltas.append({k: v for k, v in part["delta"].items() if k != "role"})
            reason = part["finish_reason"] or reason
        message = choice["message"]
        listed = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(one["name"], one["arguments"]) for one in listed]
        fields = {k: v for k, v in message.items() if k in ("content", "reasoning_content")}
        streamed, found = merged(deltas)
        streamed["content"] = streamed["content"] or (None if found else "")
        return (fields, calls, choice["finish_reason"]), (streamed, found, reason)

    def responses(self):
        """The items without ids, whole and from the stream's last event."""
        answer = ResponseAnswer({}, self.asked, "toy", self.texts)
        whole = answer.whole([[self.sample]])["output"]
        last = json.loads(self.events(response_events(answer))[-1].split("data: ")[1])
        assert last["type"] == "response.completed", last
        ids = ("id", "call_id")
        return tuple(
            [{k: v for k, v in item.items() if k not in ids} for item in items]
            for items in (whole, last["response"]["output"])
        )

    def events(self, stream):
        async def listed():
            return b"".join([part async for part in stream]).decode()

        with mock.patch.object(events, "news", self.news):
            return asyncio.run(listed()).split("\n\n")[:-1]


def check_endpoints(tools, text, pieces, prompt, content, wanted):
    served = Served(tools, text, pieces, prompt)
    (message, calls, reason), streamed = served.chat()
    assert (message, calls, reason) == streamed
    assert message == {"content": content or None} and same(calls, wanted)
    assert reason == "tool_calls"
    items, streamed = served.responses()
    assert items == streamed
    kinds = ["message"] * bool(content) + ["function_call"] * len(wanted)
    assert [item["type"] for item in items] == kinds
    assert [(item["name"], item["arguments"]) for item in items[bool(content) :]] == calls


@pytest.mark.parametrize("choice", ["auto", "required", *NAMES[:1]])
@examples(6, 600)
@given(data=st.data())
def test_both_endpoints_answer_with_the_calls(choice, data):
    form = data.draw(st.sampled_from([*FORMS]))
    schemas, wanted = drawn_calls(data, form)
    thought, prompt = drawn_thought(data)
    tools = Tools(schemas, choice, form)
    if choice == "auto":
        listed = RENDER[form](data, wanted)
        text, content = joined(thought, listed, [data.draw(words) for _ in listed])
    else:
        objects = [{"name": name, "arguments": value} for name, value in wanted]
        wanted = wanted if choice == "required" else [(choice, data.draw(arguments))]
        answer = objects if choice == "required" else wanted[0][1]
        text, content = thought + json.dumps(answer), thought.rstrip()
    check_endpoints(tools, text, pieces_of(data, text), prompt, content, wanted)


TEMPLATES = {
    "json": {
        "start_anchor": "assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<end>"},
        },
    },
    "named": {
        "start_anchor": "assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {},
        },
    },
}


@pytest.fixture(scope="module")
def templates():
    """Requests' tools by the name of a template, and the tokenizer that has it."""
    listed = [{"type": "function", "function": {"name": name}} for name in NAMES]
    found = {}
    for name, template in TEMPLATES.items():
        _, tokenizer = toy()
        tokenizer.response_template = template
        found[name] = read_tools({"tools": listed}, "", tokenizer=tokenizer), tokenizer
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@examples(10, 1500)
@given(data=st.data())
def test_transformers_parses_where_the_tokenizer_has_a_template(templates, name, data):
    tools, _ = templates[name]
    more = st.sampled_from(
        ["<call:add>", "</call>", '{"a": 1}', "<call:other>{}</call>", '{"a": 1e999}', "<end>"]
    )
    text = "".join(data.draw(st.lists(texts | more, max_size=6)))
    prompt = "assistant\n" + data.draw(st.sampled_from(["", "<think>"]))
    message, calls = streamed(tools, pieces_of(data, text), prompt)
    assert merged(tools.stream(prompt).push(text, True)) == (message, calls)
    for _, source in calls:
        assert isinstance(json.loads(source, parse_constant=pytest.fail), dict)
    served = Served(tools, text, pieces_of(data, text), prompt)
    for whole, parts in (served.chat(), served.responses()):
        assert whole == parts


def test_a_template_of_the_tokenizer_gives_thoughts_and_calls(templates):
    tools, tokenizer = templates["json"]
    call = '<tool_call>{"name": "add", "arguments": {"x": 0.10000000000000000555}}</tool_call>'
    text, prompt = f"Hm.</think>So: {call}\n{call}Done.", "user\nassistant\n<think>"
    found = merged(tools.stream(prompt).push(text, True))
    listed = [("add", '{"x": 0.10000000000000000555}')] * 2
    assert found == ({"content": "So:Done.", "reasoning_content": "Hm."}, listed)
    parsed = tokenizer.parse_response(text, prefix=prompt)
    assert len(parsed["tool_calls"]) == 2 and parsed["thinking"] == "Hm."
    # a call that cannot be parsed, and one of an unknown tool, stay visible
    for inside in ('{"name": "add"', '{"name": "other", "arguments": {}}'):
        text = f"So: <tool_call>{inside}</tool_call> Done."
        message, calls = merged(tools.stream("assistant\n").push(text, True))
        assert not calls and message == {"content": f"So:{inside} Done."}
    served = Served(tools, f"Hm.</think>So: {call}", [], prompt)
    items, _ = served.responses()
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    # a server's own choice of a format comes first
    fields = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    assert read_tools(fields, "", parser="hermes", tokenizer=tokenizer).parser is None
    assert tools.needs_special_tokens(tokenizer)
