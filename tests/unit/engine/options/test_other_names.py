"""Arguments by the names that other libraries and clients have for them."""

import inspect

import pytest

import csd
from csd.cli.main import main
from csd.engine.options import GenerateOptions, Options
from csd.integrations.ray import Sampler
from csd.models.demo import toy
from csd.utils.arguments import options_of
from csd.utils.other_names import _NAMES, _REMARKS

MODEL, TOKENIZER = toy()
CASES = [
    ("n", "did you mean num_samples"),
    ("num_return_sequences", "did you mean num_samples"),
    ("best_of", "did you mean num_samples"),
    ("max_tokens", "did you mean max_new_tokens"),
    ("max_completion_tokens", "did you mean max_new_tokens"),
    ("stop_strings", "did you mean stop"),
    ("eos_token_id", "did you mean end_token_ids"),
    ("do_sample", "did you mean temperature"),
    ("logprobs", r"always returned, as out\[i\].logprobs"),
    ("top_logprobs_num", "did you mean top_logprobs"),
    ("guided_json", "did you mean json_schema"),
    ("thinking_budget", "did you mean max_thinking_tokens"),
    ("bad_words_ids", "did you mean bad_words"),
    ("logits_processors", "did you mean logits_processor"),
    ("num_beams", "csd does not implement it"),
    ("stream", "did you mean csd.stream"),
    ("continue_final_message", "did you mean chat_template_kwargs"),
    # typos
    ("temprature", "did you mean temperature"),
    ("num_sample", "did you mean num_samples"),
    ("maxNewTokens", "did you mean max_new_tokens"),
    ("Seed", "did you mean seed"),
]


@pytest.fixture(scope="module")
def engine():
    with csd.Engine(MODEL, tokenizer=TOKENIZER) as engine:
        yield engine


@pytest.mark.parametrize(("name", "message"), CASES, ids=[name for name, _ in CASES])
def test_functions(engine, name, message):
    expected = f"unknown argument '{name}'; [^;]*{message}"
    for function in (csd.generate, csd.stream, csd.Engine.generate, csd.Engine.stream):
        with pytest.raises(TypeError, match=expected):
            function(engine, "a", **{name: 1})


def test_dissimilar_names_have_no_suggestion(engine):
    with pytest.raises(TypeError, match=r"unknown argument 'xyzzy'; the arguments are [\w, ]+$"):
        engine.generate("a", xyzzy=1)


def test_an_engine():
    for name, message in (("max_num_seqs", "max_slots"), ("gpu_memory_utilization", "memory")):
        with pytest.raises(TypeError, match=f"unknown argument '{name}'.*did you mean {message}"):
            csd.Engine(MODEL, **{name: 1})
    assert "max_slots" in inspect.signature(csd.Engine).parameters
    # no argument of another function
    with pytest.raises(TypeError, match=r"unknown argument 'max_tokens'; the arguments [\w, ]+$"):
        csd.Engine(MODEL, max_tokens=5)
    with pytest.raises(TypeError, match=r"unknown argument 'n'.*did you mean num_samples\?$"):
        Sampler(MODEL, num_samples=1, seed=0, n=2)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max-tokens", "did you mean --max-new-tokens?"),
        ("--num-return-sequences=4", "did you mean --num-samples?"),
        ("--stop-strings", "did you mean --stop?"),
        ("--temprature", "did you mean --temperature?"),
        ("--logprobs", "always returned"),
        ("--xyzzy", "unrecognized arguments: --xyzzy 3\n"),
    ],
)
def test_flags(capsys, flag, message):
    with pytest.raises(SystemExit) as ended:
        main(["sample", "model", "prompt", flag, "3"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_leads_to_arguments_and_hides_none():
    parameters = {*options_of(GenerateOptions), *inspect.signature(csd.Engine).parameters}
    assert {*_NAMES.values()} <= parameters
    assert not {*_NAMES, *_REMARKS} & {*options_of(Options)}
    assert not {*_NAMES} & {*_REMARKS}
