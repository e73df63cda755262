"""Help of the subcommands: a summary, examples, and the defaults of flags."""

import argparse
from argparse import ArgumentParser, _SubParsersAction


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that appends the default of a flag if its help does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        # by identity: 0 equals False, but is a default to show
        silent = any(action.default is x for x in (None, True, False, argparse.SUPPRESS))
        if silent or action.default == [] or "default" in text:
            return text
        return f"{text} (default: %(default)s)".strip()


def add_command(
    commands: _SubParsersAction, name: str, summary: str, examples: list[str], page: str
) -> ArgumentParser:
    """Add a subcommand. summary: a clause; examples: command lines; page: a file of docs/."""
    shown = "\n".join(f"  {example}" for example in examples)
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{shown}\n\ndocumentation: docs/{page}",
        formatter_class=Help,
    )
