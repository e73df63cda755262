"""The arguments as users see them: flags of the `csd` command, signatures and docstrings."""

import inspect
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from csd.engine.options import GenerateOptions, read_options
from csd.utils.arguments import options_of

# flags of every command that loads a model
LOADING = ("device", "dtype", "quantization", "revision")


def loading(args: Namespace) -> dict[str, Any]:
    """Arguments of `engine_for` in the flags of LOADING."""
    return {name: getattr(args, name) for name in LOADING}


def check_flags(args: Namespace, names: Iterable[str], kind: type = GenerateOptions) -> None:
    """Check `names` before a model is loaded; raises TypeError or ValueError naming one."""
    read_options({name: getattr(args, name) for name in names}, kind)


def add_flags(
    parser: ArgumentParser, names: Iterable[str], kind: type = GenerateOptions, **defaults: Any
) -> None:
    """Add a flag for each of `names`, arguments of `kind`; `defaults` replace those declared."""
    known_options = options_of(kind)
    listed = {*names}
    # in the same order for all commands
    for name in [name for name in known_options if name in listed]:
        option = known_options[name][1]
        default = defaults.get(name, option.default)
        flag = "--" + name.replace("_", "-")
        text = option.flag_help or option.help
        if option.flag is bool:
            if default:
                negated = f"do not {text}"
                parser.add_argument(
                    "--no-" + flag[2:], dest=name, action="store_false", help=negated
                )
            else:
                parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(option.flag, tuple):
            for switch in option.flag:
                parser.add_argument(
                    switch.flag(name),
                    dest=name,
                    action="store_const",
                    const=switch.value,
                    default=default,
                    help=switch.help,
                )
        elif option.flag is list:
            parser.add_argument(flag, action="append", help=text + "; repeatable")
        else:
            if option.flag is None:
                raise ValueError(f"{name} has no flag")
            flags = [flag] if option.short is None else [option.short, flag]
            flags += option.also
            if name in defaults and "default" in text:
                text += f"; this command's default: {default}"
            parser.add_argument(*flags, type=option.flag, default=default, help=text)


F = TypeVar("F", bound=Callable)


def shows(kind: type) -> Callable[[F], F]:
    """Decorator that lists the arguments in `kind` in the signature and docstring of a function,
    or of a class, whose `__init__` takes them."""

    def decorate(function: F) -> F:
        called: Any = vars(function)["__init__"] if isinstance(function, type) else function
        signature = inspect.signature(called)
        listed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        lines = []
        for name, (hint, option) in options_of(kind).items():
            listed.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hint
                )
            )
            text = f"{name}: {option.default!r}. {option.help}."
            lines += textwrap.wrap(text, 92, subsequent_indent="    ")
        called.__signature__ = signature.replace(parameters=listed)
        arguments = "Keyword arguments, with their defaults:\n\n" + "\n".join(lines)
        doc = inspect.getdoc(function) or ""
        function.__doc__ = doc.replace("{options}", arguments)
        return function

    return decorate
