"""The arguments of generate are defined once: signature, help, checks and flags agree."""

import inspect
from argparse import SUPPRESS, ArgumentParser
from dataclasses import fields

import pytest
import torch

import csd
from csd.cli import doctor as cli_doctor
from csd.cli import eval as cli_eval
from csd.cli import main, trace
from csd.cli import serve as cli_serve
from csd.engine.options import SAMPLING, GenerateOptions, Options, read_options
from csd.engine.options.arguments import LoadingOptions
from csd.engine.options.engine_arguments import (
    EngineOptions,
    ServerOptions,
    ServiceOptions,
    WarmupOptions,
)
from csd.engine.options.params import ENDS, SamplingParams
from csd.engine.options.show import add_flags
from csd.state.filters import FILTERS, dtype_of
from csd.state.slots import Slots
from csd.utils.arguments import options_of

pytestmark = pytest.mark.quick

SHOWN = {
    csd.generate: GenerateOptions,
    csd.stream: GenerateOptions,
    csd.Engine.generate: Options,
    csd.Engine.stream: Options,
    csd.Engine: EngineOptions,
    csd.AsyncEngine: ServiceOptions,
    csd.Engine.warmup: WarmupOptions,
}


@pytest.mark.parametrize("function", SHOWN, ids=lambda f: f.__qualname__)
def test_a_signature_lists_every_argument(function):
    found = inspect.signature(function).parameters
    keyword = {n: p for n, p in found.items() if p.kind is p.KEYWORD_ONLY}
    defined = options_of(SHOWN[function])
    assert list(keyword) == list(defined)
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())
    for name, (hint, option) in defined.items():
        assert keyword[name].default is option.default
        assert keyword[name].annotation == hint
        assert f"\n{name}: {option.default!r}. " in function.__doc__


def test_types_are_resolved():
    found = inspect.signature(csd.generate).parameters
    assert found["num_samples"].annotation is int
    assert found["temperature"].annotation == float | None
    assert found["device"].annotation == str | torch.device | None


def test_defined_tensors_are_checked():
    assert read_options({"num_samples": 3})["num_samples"] == 3
    with pytest.raises(TypeError, match=r"unknown argument 'temprature'; did you mean temp\w+\?$"):
        read_options({"temprature": 1.0})
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        read_options({"num_samples": 0})
    with pytest.raises(TypeError, match=r"until must be csd.Vote\(\) or a function of samples"):
        read_options({"until": csd.Vote})


@pytest.mark.parametrize("flags", [main.SAMPLE_FLAGS, trace.RECORD_FLAGS, cli_eval.OPTIONS])
def test_flags_have_the_defaults_and_texts_of_the_definition(flags):
    parser = ArgumentParser()
    add_flags(parser, flags)
    defined = options_of(GenerateOptions)
    found = vars(parser.parse_args([]))
    assert found == {name: defined[name][1].default for name in flags}
    actions = {action.dest: action for action in parser._actions}
    for name in flags:
        option = defined[name][1]
        assert (option.flag_help or option.help) in actions[name].help
    assert actions["temperature"].option_strings == ["--temperature"]


TABLES = {
    "serve": [(ServiceOptions, cli_serve.ENGINE_FLAGS), (ServerOptions, cli_serve.SERVER_FLAGS)],
    "warmup": [(WarmupOptions, cli_doctor.SIZE_FLAGS), (LoadingOptions, cli_doctor.MODEL_FLAGS)],
}


@pytest.mark.parametrize("command", TABLES)
def test_a_command_has_the_defaults_and_texts_of_the_tables(command):
    parser = main.make_parser()[1].choices[command]
    actions = {action.dest: action for action in parser._actions}
    for kind, names in TABLES[command]:
        for name in names:
            option = options_of(kind)[name][1]
            assert actions[name].default == option.default
            switches = option.flag if isinstance(option.flag, tuple) else ()
            for switch in switches:
                action = parser._option_string_actions[switch.flag(name)]
                assert (action.dest, action.const, action.help) == (name, switch.value, switch.help)
            assert switches or (option.flag_help or option.help) in actions[name].help
            assert {*option.also} <= {*actions[name].option_strings}
    # no flag of the command has an argument's name or a default beside its tables
    known = {name for kind, _ in TABLES[command] for name in options_of(kind)}
    listed = {name for _, names in TABLES[command] for name in names}
    assert known & {*actions} == listed
    rest = [action.default for dest, action in actions.items() if dest not in listed]
    assert all(default in (None, False, [], SUPPRESS) for default in rest)


def test_no_flag_of_doctor_has_a_default():
    actions = main.make_parser()[1].choices["doctor"]._actions
    assert {str(action.default) for action in actions} == {"None", "False", SUPPRESS}


@pytest.mark.parametrize(
    "flags, exact, prefix_cache",
    [
        ([], None, 0.1),
        (["--exact"], True, 0.1),
        (["--portable"], "portable", 0.1),
        (["--no-prefix-cache"], None, False),
    ],
)
def test_a_switch_sets_one_value_of_its_option(flags, exact, prefix_cache):
    args = main.make_parser()[0].parse_args(["serve", "MODEL", *flags])
    assert args.exact == exact and args.prefix_cache == prefix_cache
    assert type(args.prefix_cache) is type(prefix_cache)


def test_the_server_has_the_defaults_of_its_table():
    pytest.importorskip("uvicorn")
    from csd.serve.http import Server, process

    found = {**inspect.signature(process).parameters, **inspect.signature(Server).parameters}
    for name in ("host", "port", "drain", "tool_call_parser"):
        assert found[name].default == options_of(ServerOptions)[name][1].default
    assert found["connections"].default == options_of(ServerOptions)["max_connections"][1].default


def test_sampling_arguments_are_the_fields_of_the_parameters():
    named = {*SamplingParams.DEFAULTS} - {"end_ids"} | {*ENDS}
    assert named == SAMPLING
    assert set(options_of(Options)) >= SAMPLING
    assert vars(SamplingParams()) == SamplingParams.DEFAULTS
    with pytest.raises(TypeError, match="unknown parameters"):
        SamplingParams(temprature=1.0)


def test_filters_have_a_tensor_of_the_slots_that_turns_them_off():
    slots = Slots.empty(2, 40, 4, 2)
    assert {f.name for f in fields(Slots)} >= {*FILTERS}
    for name, off in FILTERS.items():
        tensor = getattr(slots, name)
        assert tensor.tolist() == [off] * 2 and tensor.dtype == dtype_of(name)
        assert getattr(SamplingParams(), name) == off
