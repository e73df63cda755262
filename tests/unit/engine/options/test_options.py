"""The arguments of generate are defined once: signature, help, checks and flags agree."""

import inspect
from argparse import ArgumentParser
from dataclasses import fields

import pytest
import torch

import csd
from csd.cli import eval as cli_eval
from csd.cli import main, trace
from csd.cli import serve as cli_serve
from csd.engine.options import SAMPLING, GenerateOptions, Options, read_options
from csd.engine.options.engine_arguments import EngineOptions, ServerOptions, ServiceOptions
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
        assert defined[name][1].help in actions[name].help
    assert actions["temperature"].option_strings == ["--temperature"]


def test_the_server_has_the_defaults_and_texts_of_the_tables():
    parser = ArgumentParser()
    commands = parser.add_subparsers()
    cli_serve.add(commands)
    actions = {action.dest: action for action in commands.choices["serve"]._actions}
    for kind, names in (
        (ServiceOptions, cli_serve.ENGINE_FLAGS),
        (ServerOptions, cli_serve.SERVER_FLAGS),
    ):
        for name in names:
            option = options_of(kind)[name][1]
            assert actions[name].default == option.default
            assert option.help in actions[name].help
            assert {*option.also} <= {*actions[name].option_strings}
    # no flag of the command has an argument's name beside its table
    known = {*options_of(ServiceOptions), *options_of(ServerOptions)}
    special = {"exact", "prefix_cache"}
    listed = {*cli_serve.ENGINE_FLAGS, *cli_serve.SERVER_FLAGS}
    assert (known & {*actions}) - special == listed


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
