"""Tools: calls in the formats of templates, whole and streamed, and by a grammar."""

import json
from importlib.util import find_spec

import pytest
from helpers.runs.served import call, chat, events

pytest.importorskip("starlette")

from csd.serve.http.api.calls.forms import FORMS
from csd.serve.http.api.calls.streams import merged
from csd.serve.http.api.tools import Tools, read_tools
from csd.serve.http.errors import Refused

PATH = "/v1/chat/completions"
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NUMBER |= {"additionalProperties": False}
WORD = {
    "type": "object",
    "properties": {"word": {"$ref": "#/$defs/word"}},
    "required": ["word"],
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["a", "b"]}},
}
# the third tool takes an object of any values, which a random model does not end
LISTED = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "say", "parameters": WORD}},
    {"type": "function", "function": {"name": "end"}},
]
SCHEMAS = {"add": NUMBER, "say": WORD, "end": {"type": "object"}}
ADD, SAY = '{"name": "add", "arguments": {"x": 1}}', '{"name": "say", "arguments": {"word": "é}"}}'
CALLS = [("add", '{"x": 1}'), ("say", '{"word": "é}"}')]
LLAMA = ADD.replace("arguments", "parameters"), SAY.replace("arguments", "parameters")

TAGGED = f"<tool_call>{ADD}</tool_call>"
OTHER = TAGGED.replace("add", "other")
WRITE = '{"name": "say", "arguments": {"word": "</tool_call>"}}'
DIGITS = "0.10000000000000000555"


def read(tools, text):
    """Content and calls of a whole text behind a prompt that leaves no thought open."""
    message, calls = merged(tools.stream().push(text, True))
    return message["content"], calls


def as_call(arguments):
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


def as_xml(name, **values):
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    return f"<tool_call><function={name}>{body}</function></tool_call>"


# form, text, content and calls
TEXTS = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", None, CALLS[:1]),
    (
        "hermes",
        f"I add < 1.\n<tool_call>{ADD}</tool_call>\n<tool_call>{SAY}</tool_call>",
        "I add < 1.",
        CALLS,
    ),
    ("hermes", f"<tool_call>{ADD}", None, CALLS[:1]),
    ("hermes", f"<tool_call>{ADD}</tool_call> and more", "and more", CALLS[:1]),
    ("hermes", f"so <tool_call>{ADD.replace('add', 'other')}</tool_call>", "", []),
    ("hermes", "<tool_call>{</tool_call>", "", []),
    ("hermes", "plain <tool text", "", []),
    ("mistral", f"[TOOL_CALLS][{ADD}, {SAY}]", None, CALLS),
    ("mistral", f" [{ADD}, {SAY}]", None, CALLS),
    ("mistral", 'So.[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]say{"word": "é}"}', "So.", CALLS),
    ("mistral", 'add{"x": 1}', None, CALLS[:1]),
    ("mistral", "add them", "", []),
    ("mistral", "[1, 2]", "", []),
    ("mistral", f"[{ADD}, 5]", ", 5]", CALLS[:1]),
    ("mistral", "plain [TOOL_ text", "", []),
    ("llama3_json", LLAMA[0], None, CALLS[:1]),
    ("llama3_json", f"<|python_tag|>{LLAMA[0]}; {LLAMA[1]}", None, CALLS),
    ("llama3_json", f"{LLAMA[0]} and more", "and more", CALLS[:1]),
    ("llama3_json", "{5: 6}", "", []),
    ("llama3_json", f"So: {LLAMA[0]}", "", []),
    ("llama3_json", "", "", []),
    (None, f"<tool_call>{ADD}</tool_call>", "", []),
    # tags within strings, and around thoughts
    ("hermes", f"<tool_call>{WRITE}</tool_call>", None, [("say", '{"word": "</tool_call>"}')]),
    ("hermes", f"<think>{TAGGED}</think>\n{TAGGED}", f"<think>{TAGGED}</think>", CALLS[:1]),
    ("hermes", f"<think>{TAGGED}", "", []),
    ("hermes", f"A <think> is a tag. {TAGGED}", "A <think> is a tag.", CALLS[:1]),
    ("hermes", f"A <think>{TAGGED}</think>{TAGGED}", f"A <think>{TAGGED}</think>", CALLS[:1]),
    # one call beside what is none
    ("hermes", f"{OTHER}{TAGGED}", OTHER, CALLS[:1]),
    ("hermes", f"{TAGGED}\n{OTHER}", OTHER, CALLS[:1]),
    ("hermes", f"{TAGGED}<tool_call>{{", "<tool_call>{", CALLS[:1]),
    ("hermes", f"<tool_call>{ADD}}}</tool_call>", "}</tool_call>", CALLS[:1]),
    ("hermes", f"<tool_call>[{ADD}, {SAY}]</tool_call>", None, CALLS),
    ("hermes", f"<tool_call>{ADD}\n{SAY}</tool_call>", None, CALLS),
    # arguments as null, as a text, and none
    ("hermes", as_call("null"), None, [("add", "{}")]),
    ("hermes", as_call(r'"{\"x\": 1}"'), None, CALLS[:1]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, [("add", "{}")]),
    ("llama3_json", '{"name": "add"}', "", []),
    ("hermes", as_call(r'"{\"x\": 1"'), "", []),
    ("hermes", as_call("[1]"), "", []),
    # spelled as the model did, and strict
    ("hermes", as_call('{"x":\n1e2}'), None, [("add", '{"x":\n1e2}')]),
    ("hermes", as_call(f'{{"x": {DIGITS}}}'), None, [("add", f'{{"x": {DIGITS}}}')]),
    ("hermes", as_call('{"x": "a\n\t"}'), None, [("add", r'{"x": "a\n\t"}')]),
    ("hermes", as_call(r'{"x": "\ud83d\ude00"}'), None, [("add", r'{"x": "\ud83d\ude00"}')]),
    *(
        ("hermes", as_call(f'{{"x": {value}}}'), "", [])
        for value in ("NaN", "-Infinity", "1e999", "1" * 400, r'"\ud800"', "[" * 200 + "]" * 200)
    ),
    # XML, with the types of the schema
    ("qwen3_coder", as_xml("add", x="1"), None, CALLS[:1]),
    ("hermes", as_xml("add", x="1"), None, CALLS[:1]),
    ("qwen3_coder", f"<tool_call>{ADD}</tool_call>", None, CALLS[:1]),
    ("qwen3_coder", as_xml("add", x="True"), None, [("add", '{"x": true}')]),
    ("qwen3_coder", as_xml("add", x="one"), None, [("add", '{"x": "one"}')]),
    ("qwen3_coder", as_xml("add", x="1e999"), None, [("add", '{"x": "1e999"}')]),
    ("qwen3_coder", as_xml("say", word="\n1\n\n"), None, [("say", r'{"word": "1\n"}')]),
    ("qwen3_coder", as_xml("end", a="1"), None, [("end", '{"a": "1"}')]),
    ("qwen3_coder", as_xml("end"), None, [("end", "{}")]),
    ("qwen3_coder", f"So.\n{as_xml('add', x='1')[11:]} More.", "So. More.", CALLS[:1]),
    ("qwen3_coder", as_xml("add", x="1").replace("</parameter>", ""), None, CALLS[:1]),
    ("qwen3_coder", as_xml("add", x="1").replace("</function>", ""), None, CALLS[:1]),
    ("qwen3_coder", as_xml("add", x="1").split("</function>")[0], "", []),
    (
        "qwen3_coder",
        as_xml("other", x="1") + as_xml("add", x="1"),
        as_xml("other", x="1"),
        CALLS[:1],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_a_text_is_calls_or_stays(form, text, content, calls):
    tools = Tools(SCHEMAS, "auto", form)
    want = (text, []) if not calls else (content, calls)
    assert read(tools, text) == want
    # streamed in parts of any size, with its content as soon as it is certain
    for size in range(1, len(text) + 2):
        stream, found, listed = tools.stream(), "", []
        for start in range(0, len(text), size):
            for delta in stream.push(text[start : start + size], False):
                assert delta.keys() == {"content"} and delta["content"]
                found += delta["content"]
        for delta in stream.push("", True):
            found += delta.get("content", "")
            listed += delta.get("tool_calls", [])
        assert found == (want[0] or "") and stream.calls == len(calls)
        functions = [(one["function"]["name"], one["function"]["arguments"]) for one in listed]
        assert functions == calls and [one["index"] for one in listed] == [*range(len(calls))]
        assert len({one["id"] for one in listed}) == len(calls)


TYPES = [
    ({"type": "string"}, "12", '"12"'),
    ({"type": "string"}, "null", '"null"'),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": [1, 2]}, "1", "1"),
    ({"const": 5}, "5", "5"),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["integer", "string"]}, "7", "7"),
    ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "7", "7"),
    ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "[7]", '"[7]"'),
    ({"$ref": "#/$defs/a"}, "7.50", "7.50"),
    ({"$ref": "#/$defs/loop"}, "7", '"7"'),
    ({"type": "number"}, "0.10000000000000000555", "0.10000000000000000555"),
    ({"type": "boolean"}, "FALSE", "false"),
    ({"type": "object"}, "{'a': None, 'b': (1,)}", '{"a": null, "b": [1]}'),
    ({"type": "object"}, '{"a": "</parameter></function>"}', '{"a": "</parameter></function>"}'),
    ({"type": "object"}, "{'a': 1e999}", "\"{'a': 1e999}\""),
    ({"type": "array"}, "{1}", '"{1}"'),
    ({}, "12", '"12"'),
    (True, "12", '"12"'),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPES)
def test_a_parameter_of_xml_has_the_type_of_its_schema(schema, text, value):
    found = {"a": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}
    schemas = {"f": {"type": "object", "properties": {"x": schema}, "$defs": found}}
    tools = Tools(schemas, "auto", "qwen3_coder")
    assert read(tools, as_xml("f", x=text)) == (None, [("f", f'{{"x": {value}}}')])


def test_a_list_that_was_cut_has_the_calls_that_are_whole():
    tools = Tools(SCHEMAS, "required", None)
    cut = f"[{ADD}, {SAY[:-4]}"
    assert read(tools, cut) == (f", {SAY[:-4]}", CALLS[:1])
    assert read(tools, SAY[:-4]) == (SAY[:-4], [])


def test_text_without_calls_is_streamed_as_it_is_drawn():
    text = "A sentence that is no call at all."
    for form in FORMS:
        stream = Tools(SCHEMAS, "auto", form).stream()
        deltas = [[*stream.push(letter, False)] for letter in text]
        sent = "".join(delta["content"] for some in deltas for delta in some)
        assert text.startswith(sent) and len(sent) > len(text) - 3, form


def test_arguments_of_a_named_tool_are_streamed_without_outer_spaces():
    tools = Tools(SCHEMAS, "say", None)
    for text in (' {"word":\n "a b "}\n ', "{\n\n", " ", ""):
        for size in range(1, len(text) + 2):
            stream, arguments = tools.stream(), ""
            for start in range(0, len(text) + 1, size):
                deltas = stream.push(text[start : start + size], start + size > len(text))
                for delta in deltas:
                    arguments += delta["tool_calls"][0]["function"]["arguments"]
            assert read(tools, text) == (None, [("say", arguments)])


def test_formats_are_known_by_the_template():
    signs = {
        "hermes": "{{ '<tool_call>' }}",
        "mistral": "{{ '[TOOL_CALLS]' }}",
        "llama3_json": 'Respond as {"name": function, "parameters": dict}',
        "qwen3_coder": "{{ '<tool_call><function=f><parameter=x>' }}",
        None: "{{ tools }}",
    }
    for form, template in signs.items():
        assert read_tools({"tools": LISTED}, template) == Tools(SCHEMAS, "auto", form)


def test_a_format_that_the_server_names_is_not_the_templates():
    fields, template = {"tools": LISTED}, "{{ '<tool_call>' }}"
    for form in FORMS:
        assert read_tools(fields, template, parser=form) == Tools(SCHEMAS, "auto", form)
    assert read_tools(fields, template, parser="none") == Tools(SCHEMAS, "auto", None)
    # a grammar's calls need no format
    asked = fields | {"tool_choice": "required"}
    assert read_tools(asked, template, parser="none") == Tools(SCHEMAS, "required", None, tags=())


@pytest.mark.parametrize("tags", [5, "ab", {"a": 1}, [], ["<a>"], ["", "b"], [[1], [2]], [None, 1]])
def test_tags_that_are_no_texts_leave_the_common_ones(tags):
    """The engine refuses those that it cannot read."""
    fields = {"tools": LISTED, "thinking_tags": tags}
    assert read_tools(fields, "<tool_call>") == Tools(SCHEMAS, "auto", "hermes")
    own = fields | {"thinking_tags": ["<a>", "</a>", "so </a>"]}
    assert read_tools(own, "<tool_call>").tags == (("<a>", "</a>"),)
    # a grammar begins with the text, unless it leaves room for a thought
    required = own | {"tool_choice": "required"}
    assert read_tools(required, "").tags == ()
    assert read_tools(required | {"max_thinking_tokens": 5}, "").tags == (("<a>", "</a>"),)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_are_called(mode):
    """In the forms of chats and of responses; the others stay in the prompt alone."""
    in_chat = {"mode": mode, "tools": [LISTED[1], LISTED[0]]}
    listed = [{"type": "function", "name": name} for name in ("add", "say")]
    for choice in ({"allowed_tools": in_chat}, {"mode": mode, "tools": listed}):
        asked = {"tools": LISTED, "tool_choice": {"type": "allowed_tools"} | choice}
        tools = read_tools(asked, "<tool_call>")
        assert tools == read_tools({"tools": LISTED[:2], "tool_choice": mode}, "<tool_call>")
        assert [*tools.schemas] == ["add", "say"]
    if mode == "auto":
        end = TAGGED.replace("add", "end")
        assert read(tools, f"{end}{TAGGED}") == (end, CALLS[:1])
        assert read(tools, end) == (end, [])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "tool_choice.mode must be auto or required"),
        ({"mode": "none", "tools": LISTED}, "tool_choice.mode must be auto or required"),
        ({"mode": "auto", "tools": []}, "tool_choice.tools must be a list of functions"),
        ({"mode": "auto", "tools": [5]}, r"tool_choice.tools\[0\] must be a function of add"),
        (
            {"allowed_tools": {"mode": "auto", "tools": [LISTED[0], {"type": "mcp"}]}},
            r"tool_choice.allowed_tools.tools\[1\] must be a function of add, say, end",
        ),
        ({"allowed_tools": {"tools": LISTED}}, "tool_choice.allowed_tools.mode must be"),
    ],
)
def test_other_allowed_tools_are_refused(fields, named):
    with pytest.raises(Refused, match=named) as refused:
        read_tools({"tools": LISTED, "tool_choice": {"type": "allowed_tools"} | fields}, "")
    assert refused.value.param == "tool_choice"


def test_functions_of_the_first_interface_are_tools(port, template, engine):
    """`function_call` and the role `function`, which OpenAI's clients still send."""
    from csd.serve.http.api.request import with_tools

    asked = {"role": "user", "content": "Add."}
    called = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    result = {"role": "function", "name": "f", "content": "3"}
    call_of = {"id": "call_1", "type": "function", "function": called["function_call"]}
    tool = result | {"role": "tool", "tool_call_id": "call_1"}
    own = [asked, {"role": "assistant", "content": None, "tool_calls": [call_of]}, tool]
    assert with_tools([asked, called, result], "'tool'") == own
    assert with_tools([result], '"tool"') == [result | {"role": "tool"}]
    assert with_tools(own, "'tool'") == own
    # without tools in a template, which may read them, they are left to its checks
    assert with_tools([asked, called, result], "") == [asked, called, result]
    status, answer = call(port, PATH, chat(messages=[asked, result]))
    assert status == 200, answer
    status, answer = call(port, PATH, chat(messages=[{"role": "usr", "content": "a"}]))
    assert status == 400 and answer["error"]["param"] == "messages"
    assert "'usr' as 'messages[0].role'" in answer["error"]["message"]


BAD = [
    ({"tools": LISTED, "tool_choice": "any"}, "tool_choice"),
    ({"tools": LISTED, "tool_choice": 5}, "tool_choice"),
    ({"tools": LISTED, "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": LISTED, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [5], "tool_choice": "required"}, "tools"),
    ({"tools": LISTED, "tool_choice": "required", "regex": "a"}, "regex"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_other_tools_are_refused(fields, param):
    with pytest.raises(Refused) as refused:
        read_tools(fields, "")
    assert refused.value.param == param and refused.value.status == 400


def test_none_and_no_tools_are_text():
    assert read_tools({"tools": LISTED, "tool_choice": "none"}, "<tool_call>") is None
    assert read_tools({"tools": [], "tool_choice": "auto"}, "<tool_call>") is None


@pytest.fixture
def template(engine, monkeypatch):
    """The toy's template, which reads tools and has calls as Hermes."""
    plain = engine.tokenizer.chat_template
    reads = "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{% endif %}"
    monkeypatch.setattr(engine.tokenizer, "chat_template", reads + plain + "{# <tool_call> #}")


@pytest.fixture
def no_spaces(engine):
    """Tokens that a random model may repeat between any two parts of JSON."""
    return engine.tokenizer(" \n\t", add_special_tokens=False)["input_ids"]


def streamed(port, body):
    """Messages of the choices, put together as clients do."""
    found = {}
    for event in events(port, PATH, body):
        for choice in event["choices"]:
            message = found.setdefault(choice["index"], {"content": "", "calls": {}})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for one in delta.get("tool_calls", []):
                own = message["calls"].setdefault(one["index"], {"id": one.get("id"), "text": ""})
                own["name"] = one["function"].get("name") or own["name"]
                own["text"] += one["function"]["arguments"]
            message["reason"] = choice["finish_reason"] or message.get("reason")
    return [found[i] for i in sorted(found)]


def both(port, tools=LISTED, tokens=150, **fields):
    """Name and arguments of each choice's calls, the same whole and streamed; and its content."""
    body = chat(n=3, seed=5, tools=tools, max_tokens=tokens, temperature=1.0, **fields)
    status, answer = call(port, PATH, body)
    assert status == 200, answer
    listed = []
    for choice, parts in zip(answer["choices"], streamed(port, body), strict=True):
        message = choice["message"]
        calls = [
            (one["function"]["name"], one["function"]["arguments"])
            for one in message.get("tool_calls", [])
        ]
        assert [(one["name"], one["text"]) for one in parts["calls"].values()] == calls
        assert parts["content"] == (message["content"] or "")
        assert parts["reason"] == choice["finish_reason"]
        listed.append((message["content"], calls, choice["finish_reason"]))
    return listed


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_a_named_tool_gets_arguments_of_its_schema(port, template, no_spaces):
    named = {"type": "function", "function": {"name": "say"}}
    for content, calls, reason in both(port, tool_choice=named, suppress_tokens=no_spaces):
        ((name, arguments),) = calls
        assert (content, name, reason) == (None, "say", "tool_calls")
        assert json.loads(arguments) in ({"word": "a"}, {"word": "b"})


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_a_required_choice_calls_tools(port, template, no_spaces):
    for content, calls, reason in both(
        port,
        LISTED[1:2],
        300,
        tool_choice="required",
        parallel_tool_calls=False,
        suppress_tokens=no_spaces,
    ):
        ((name, arguments),) = calls
        assert content is None and reason == "tool_calls" and name in SCHEMAS
        values = json.loads(arguments)
        assert name != "say" or values["word"] in ("a", "b")
        assert name != "add" or isinstance(values["x"], int)
    assert Tools(SCHEMAS, "required", None).schema["$defs"] == {"1_word": {"enum": ["a", "b"]}}


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_auto_reads_the_calls_of_the_template(port, template):
    text = 'I add <tool_call>{"name": "add", "arguments": {"x": [0-9]}}</tool_call>'
    regex = text.replace("{", r"\{").replace("}", r"\}")
    for content, calls, reason in both(port, regex=regex):
        ((name, arguments),) = calls
        assert (content, name, reason) == ("I add", "add", "tool_calls")
        assert 0 <= json.loads(arguments)["x"] <= 9
    # text that is no call stays, and `none` reads none
    for fields in (
        {"regex": regex.replace("add", "other")},
        {"regex": regex, "tool_choice": "none"},
    ):
        for content, calls, reason in both(port, **fields):
            assert content.endswith("</tool_call>") and not calls and reason == "stop"


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_a_thought_that_the_prompt_opens_has_no_calls(port, engine, template, monkeypatch):
    template = engine.tokenizer.chat_template
    monkeypatch.setattr(engine.tokenizer, "chat_template", template + "{{ '<think>\n' }}")
    draft = TAGGED.replace("{", r"\{").replace("}", r"\}")
    for content, calls, _ in both(port, regex=f"{draft}</think>So: {draft}"):
        assert content == f"{TAGGED}</think>So:" and calls == CALLS[:1]
    # words of a message open no thought
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    for content, calls, _ in both(
        port, regex=draft, messages=[{"role": "user", "content": "A <think> is a tag?"}]
    ):
        assert content is None and calls == CALLS[:1]


def test_marks_that_are_special_tokens_are_kept(engine):
    from copy import deepcopy

    from csd.serve.http.api.request import read_chat

    tokenizer = deepcopy(engine.tokenizer)
    tokenizer.chat_template += "{{ tools }}{# [TOOL_CALLS] #}"
    body = chat(tools=LISTED, skip_special_tokens=None)
    assert "skip_special_tokens" not in read_chat(body, tokenizer).options
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    assert read_chat(body, tokenizer).options["skip_special_tokens"] is False
    body["skip_special_tokens"] = True
    assert read_chat(body, tokenizer).options["skip_special_tokens"] is True


def test_a_schema_of_a_tool_is_bounded_as_a_grammar():
    from csd.serve.http import Limits
    from csd.serve.http.checks import check_sizes

    function = {"name": "f", "parameters": {"enum": ["x" * 100] * 1000}}
    body = chat(tools=[{"type": "function", "function": function}])
    check_sizes(body, Limits(), 400, 96)
    with pytest.raises(Refused, match="at most 65536 characters") as refused:
        check_sizes(body | {"tool_choice": "required"}, Limits(), 400, 96)
    assert refused.value.param == "tools"


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")
def test_the_servers_format_is_that_of_chats_and_responses(port, server, template, monkeypatch):
    called = r'\{"name": "add", "parameters": \{"x": [0-9]\}\}'
    listed = [{"type": "function", **LISTED[0]["function"]}]
    asked = dict(input="Add.", max_output_tokens=150, seed=1, tools=listed, regex=called)
    for parser, names in (("llama3_json", ["add"]), ("auto", []), ("none", [])):
        monkeypatch.setattr(server[1], "tool_call_parser", parser)
        for content, calls, reason in both(port, regex=called):
            assert [name for name, _ in calls] == names
            assert (content is None) == bool(names)
            assert reason == ("tool_calls" if names else "stop")
        (item,) = call(port, "/v1/responses", asked)[1]["output"]
        assert item["type"] == ("function_call" if names else "message")


def test_another_format_is_refused_with_those_that_are_known(tmp_path, capsys):
    from csd.cli.main import main

    command = ["serve", str(tmp_path), "--enable-auto-tool-choice", "--tool-call-parser"]
    assert main([*command, "pythonic"]) == 2
    error = capsys.readouterr().err
    assert "--tool-call-parser must be one of auto, none, mistral, qwen3_coder, hermes" in error
    assert "got 'pythonic'" in error
