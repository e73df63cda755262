"""Messages as clients send them: what a template shows of them, and what is refused by name."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

import csd
from csd.evaluate.problems.tasks import TASKS, read
from csd.models.demo import toy
from csd.models.text.messages import warn_once
from csd.models.text.prompts import parse, truncate

LOOP = "{% for m in messages %}<{{ m['role'] }}>BODY</>{% endfor %}"
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
PARTS = (
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
)
BODIES = {
    # by how they read a content
    "joins": "{{ '' + m['content'] }}",
    "prints": "{{ m.content }}",
    "trims": "{{ m['content'] | trim }}",
    "parts": PARTS,
    "both": "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}",
    "first": "{{ m.content if m.content is string else m.content[0].text }}",
    "only first": "{{ m.content[0].text }}{# for p in m.content #}",
}
MODEL, TOKENIZER = toy()


def with_template(template):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def shown(messages, template, **options):
    """The text that a prompt of messages becomes."""
    tokenizer = with_template(template)
    (ids,), many = parse(messages, tokenizer, len(tokenizer), None, options)
    assert not many
    return tokenizer.decode(ids)


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "content",
    ["one", [text("one")], [{"type": "input_text", "text": "one"}], [{"text": "one"}]],
    ids=["text", "part", "input_text", "no type"],
)
def test_a_part_is_its_text(body, content):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": content}]
    template = LOOP.replace("BODY", BODIES[body]) + END
    assert shown(messages, template) == "<system>be</><user>one</><assistant>"


@pytest.mark.parametrize("body", BODIES)
def test_several_parts_are_all_there(body):
    """In lines, or as a template that reads parts joins them itself."""
    messages = [{"role": "user", "content": [text("one"), text("two")]}]
    joined = "onetwo" if body in ("parts", "both") else "one\ntwo"
    assert shown(messages, LOOP.replace("BODY", BODIES[body])) == f"<user>{joined}</>"


@pytest.mark.parametrize("many", [False, True], ids=["one", "list"])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "got type 'image_url'"),
        ({"type": "input_audio", "input_audio": {}}, "got type 'input_audio'"),
        ({"type": "image"}, "got type 'image'"),
        ({"type": None, "text": "a"}, "got type None"),
        ({"type": "text"}, r"a string as '\[1\].content\[1\].text', got None"),
        ({"type": "text", "text": 5}, r"a string as '\[1\].content\[1\].text', got 5"),
        ({"type": "text", "text": "\ud800"}, r"a string as '\[1\].content\[1\].text'"),
        ("words", r"'\[1\].content\[1\]', got 'words'"),
        (None, r"'\[1\].content\[1\]', got None"),
    ],
)
def test_what_is_no_text_is_refused_by_name(part, message, many):
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b"), part]}]
    name = "prompt 1" if many else "prompt"
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        parse(["a", chat] if many else chat, TOKENIZER, len(TOKENIZER))


@pytest.mark.parametrize("content", [None, [], ()], ids=repr)
def test_nothing_is_refused(content):
    with pytest.raises(ValueError, match=r"^prompt must have .*'\[0\].content'"):
        parse([{"role": "user", "content": content}], TOKENIZER, len(TOKENIZER))


def called(arguments, **more):
    function = {"name": "add", "arguments": arguments}
    return [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        | more,
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": [text("3")]},
    ]


CALLS = {
    # what a template does with a call's arguments, without content
    "tojson": "{{ f.arguments | tojson }}",
    "joins": "{{ '' + f.arguments }}",
    "prints": "{{ f.arguments }}",
}
CONTENTS = {
    "joins": "{{ '' + m['content'] }}",
    "prints": "{{ m.content }}",
    "none": "{% if m.content is defined and m.content is not none %}{{ m.content }}{% endif %}",
}


# a client that sends objects has a template that reads them
SENT = [("tojson", {"a": "x", "b": 2}), *((way, s) for way in CALLS for s in ('{"a": "x"}', ""))]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("way", "sent"), SENT, ids=map(str, SENT))
@pytest.mark.parametrize(
    "more", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=repr
)
def test_calls_of_tools(content, way, sent, more):
    read = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + CALLS[way] + "{% endfor %}"
    got = shown(called(sent, **more), LOOP.replace("BODY", CONTENTS[content] + read))
    arguments = json.dumps(sent) if isinstance(sent, dict) else sent
    if not arguments and way != "joins":
        # what tools without arguments are called with
        arguments = "{}"
    assert got == f"<user>sum</><assistant>{arguments}</><tool>3</>"


def test_messages_of_a_role_that_is_left_out():
    template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}"
    )
    template += "{% endfor %}"
    for role in ("system", "tool", "function"):
        chat = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        with pytest.raises(ValueError, match=rf"^prompt must have .*got '{role}' as '\[1\].role'"):
            shown(chat, template)


def test_a_role_that_is_misspelled_is_refused():
    """A template that writes any role would show it; one that a template names is its own."""
    template = LOOP.replace("BODY", BODIES["joins"])
    for role in ("usr", "User", "", " user", "human"):
        chat = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        with pytest.raises(ValueError, match=rf"^prompt must have roles of system, .*'{role}' as"):
            shown(chat, template)
    names = template + "{# 'human' or \"critic\" #}"
    for role in ("human", "critic", "tool", "function"):
        assert shown([{"role": role, "content": "b"}], names) == f"<{role}>b</>"


def test_developers_are_the_system_where_a_template_does_not_know_them():
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]
    template = LOOP.replace("BODY", BODIES["joins"])
    assert shown(chat, template) == "<system>be brief</><user>a</>"
    knows = template + "{# developer #}"
    assert shown(chat, knows) == "<developer>be brief</><user>a</>"
    raises = "{% if m.role not in ('system', 'user') %}{{ raise_exception('no') }}{% endif %}"
    assert shown(chat, LOOP.replace("BODY", raises + BODIES["joins"])) == shown(chat, template)


def test_names_go_to_the_template():
    chat = [{"role": "user", "name": "Ada", "content": "a"}]
    assert shown(chat, LOOP.replace("BODY", "{{ m.name }}: {{ m.content }}")) == "<user>Ada: a</>"


def test_objects_of_a_client():
    class Answer(SimpleNamespace):
        def model_dump(self, exclude_none):
            return {k: v for k, v in vars(self).items() if v is not None or not exclude_none}

    chat = [{"role": "user", "content": "a"}, Answer(role="assistant", content="b", refusal=None)]
    template = LOOP.replace("BODY", BODIES["joins"])
    assert shown(chat, template) == "<user>a</><assistant>b</>"
    assert shown(chat[1:], template) == "<assistant>b</>"


@pytest.mark.parametrize("body", ["joins", "parts", "both"])
@pytest.mark.parametrize("content", ["so", [text("so")], [text("s"), text("o")]], ids=repr)
def test_a_message_is_continued(body, content):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    template = LOOP.replace("BODY", BODIES[body]) + END
    got = shown(chat, template, continue_final_message=True)
    end = "s\no" if len(content) == 2 and content != "so" and body == "joins" else "so"
    assert got == f"<user>a</><assistant>{end}"
    assert shown(chat, template, continue_final_message=True, add_generation_prompt=False) == got
    with pytest.raises(ValueError, match="both continue_final_message and add_generation_prompt"):
        shown(chat, template, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenize": False}, ValueError, "must not have 'tokenize', got False"),
        ({"return_tensors": "pt"}, ValueError, "must not have 'return_tensors', got 'pt'"),
        ({"truncation": True, "max_length": 2}, ValueError, "must not have 'truncation', got True"),
        ({1: 2}, TypeError, "chat_template_kwargs must be a dict with strings as keys"),
        ("thinking", TypeError, "chat_template_kwargs must be a dict, got 'thinking'"),
    ],
)
def test_options_of_a_template_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        parse([{"role": "user", "content": "a"}], TOKENIZER, len(TOKENIZER), None, options)


@pytest.mark.parametrize("prompt", ["a", [5, 6], ["a", "b"]], ids=["text", "ids", "texts"])
def test_options_of_a_template_go_with_messages(prompt):
    with pytest.raises(ValueError, match="needs a prompt of messages, got thinking"):
        parse(prompt, TOKENIZER, len(TOKENIZER), None, {"thinking": True})
    chat = [{"role": "user", "content": "a"}]
    assert parse(["a", chat], TOKENIZER, len(TOKENIZER), None, {"thinking": True})[1]


def test_a_template_of_the_call():
    tokenizer = with_template(None)
    chat = [{"role": "user", "content": [text("a")]}]
    options = {"chat_template": LOOP.replace("BODY", BODIES["prints"])}
    (ids,), _ = parse(chat, tokenizer, len(tokenizer), None, options)
    assert tokenizer.decode(ids) == "<user>a</>"


def test_samples_of_parts_are_those_of_the_text(tmp_path):
    """In calls, and where a reward model reads the prompt."""
    engine = csd.Engine(MODEL, tokenizer=TOKENIZER)
    options = dict(num_samples=2, max_new_tokens=4, seed=0)
    texts = [[{"role": "user", "content": c}] for c in ("one", [text("one")])]
    a, b = (csd.generate(engine, chat, **options) for chat in texts)
    assert a.prompt_ids == b.prompt_ids and a.tokens == b.tokens
    rows = [json.dumps({"prompt": chat, "answer": "1"}) for chat in texts]
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(rows))
    assert [p.prompt for p in read(path, TASKS["jsonl"])] == texts
    path.write_text(
        json.dumps({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"})
    )
    with pytest.raises(ValueError, match="line 1 'prompt' must have parts of type 'text'"):
        read(path, TASKS["jsonl"])
    engine.release()


SHOWN_CALLS = LOOP.replace(
    "BODY",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)


@pytest.mark.parametrize("arguments", ['{"a": "x"}', {"a": "x"}, "{}", ""], ids=repr)
@pytest.mark.parametrize("content", [{}, {"content": "I add."}], ids=["alone", "with words"])
def test_calls_of_tools_that_a_template_leaves_out_are_refused(arguments, content):
    """Alone, and beside words that it shows; the error's advice shows them."""
    chat = called(arguments, **content)
    template = LOOP.replace("BODY", CONTENTS["none"])
    with pytest.raises(ValueError, match=r"^prompt must have fields .*'\[1\].tool_calls\[0\]") as e:
        shown(chat, template)
    assert "pass a template that shows them as chat_template_kwargs={'chat_template'" in str(
        e.value
    )
    got = shown(chat, template, chat_template=SHOWN_CALLS)
    words = content.get("content", "")
    assert got.startswith(f"<user>sum</><assistant>{words}add{{") and got.endswith("<tool>3</>")
    assert "write these words in the content" in str(e.value)
    written = [chat[0], {"role": "assistant", "content": f"add {arguments}"}, chat[2]]
    assert f"<assistant>add {arguments}</>" in shown(written, template)


def test_a_call_of_which_a_part_is_shown_is_named_in_the_log(caplog):
    warn_once.cache_clear()
    only = LOOP.replace(
        "BODY", "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}"
    )
    assert "<assistant>add</>" in shown(called('{"a": "x"}', content="I add."), only)
    lines = [record.getMessage() for record in caplog.records]
    assert any("'tool_calls.function.arguments.a'" in line for line in lines)
    assert any("'content' of a message of role 'assistant'" in line for line in lines)


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize(
    "arguments", [{"a": "x"}, {"a": True, "b": [None, "y"]}, {"a": {"z": 1}}], ids=repr
)
@pytest.mark.parametrize("sent", [lambda value: value, json.dumps], ids=["object", "text"])
def test_arguments_are_json_and_no_repr_of_python(way, arguments, sent):
    read = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + CALLS[way] + "{% endfor %}"
    got = shown(called(sent(arguments)), LOOP.replace("BODY", CONTENTS["none"] + read))
    (text,) = re.findall("<assistant>(.*)</><tool>", got)
    assert json.loads(text) == arguments


def test_an_argument_that_a_template_joins_is_json():
    """A template that writes each argument by itself."""
    join = "{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    read = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + join + "{% endfor %}"
    template = LOOP.replace("BODY", CONTENTS["none"] + read)
    for arguments in ({"a": {"b": "y"}, "c": ["z"], "d": 2}, '{"a":{"b":"y"},"c":["z"],"d":2}'):
        assert '<assistant>a={"b": "y"};c=["z"];d=2;</>' in shown(called(arguments), template)


def test_a_content_of_a_user_that_is_left_out():
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"^prompt must have fields .* got '\[0\].content'"):
        shown(chat, "{{ messages[-1].content }}")
    assert shown(chat[1:], "{{ messages[-1].content }}") == "b"


def special_tokenizer(begin, end, names):
    """A tokenizer that puts special tokens before and behind each text."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens(names)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {*begin, *end}]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end], special_tokens=ids
    )
    return tokenizer


SPECIAL = {
    "none": ([], [], {}),
    "end": ([], ["<end>"], {}),
    "begin and end": (["<s>"], ["</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "word pieces": (["[CLS]"], ["[SEP]"], {"cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "two that begin": (
        ["[gMASK]", "<sop>"],
        [],
        {"additional_special_tokens": ["[gMASK]", "<sop>"]},
    ),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_prompt_is_continued_without_the_end_token_that_its_tokenizer_appends(kind, caplog):
    begin, end, names = SPECIAL[kind]
    tokenizer = special_tokenizer(begin, end, names)
    warn_once.cache_clear()
    (ids,), _ = parse("one", tokenizer, len(tokenizer))
    assert tokenizer.convert_ids_to_tokens(ids) == [*begin, "o", "n", "e"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the tokenizer ends a text with '{token}': a prompt is continued, so the token is left out"
        for token in end
    ]
    for token in end:
        # an end token that the text itself has stays
        (ids,), _ = parse(f"one{token}", tokenizer, len(tokenizer))
        assert tokenizer.convert_ids_to_tokens(ids) == [*begin, "o", "n", "e", token]
    # the form in which a message is continued
    tokenizer.chat_template = LOOP.replace("BODY", BODIES["joins"]) + END
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    (ids,), _ = parse(chat, tokenizer, len(tokenizer), None, {"continue_final_message": True})
    assert tokenizer.decode(ids[-2:]) == "so"


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_prompt_that_is_cut_keeps_the_special_tokens_that_it_begins_with(kind):
    begin, end, names = SPECIAL[kind]
    tokenizer = special_tokenizer(begin, end, names)
    (ids,), _ = parse("one two", tokenizer, len(tokenizer))
    for count in range(1, len(ids) + 2):
        cut = tokenizer.convert_ids_to_tokens(truncate(ids, count, tokenizer))
        assert len(cut) == min(count, len(ids))
        leading = min(len(begin), count - 1)
        assert cut[:leading] == begin[:leading]
        assert "".join(cut[leading:]) == "".join(
            [*begin, *"one two"][leading + len(ids) - len(cut) :]
        )
    # token ids without a tokenizer have no special ones
    assert truncate(ids, 2, None) == ids[-2:]
