"""`csd schema NAME`: the JSON schema of a command's output."""

import json
from argparse import Namespace, _SubParsersAction

from csd.cli.commands import add_command
from csd.cli.formats import FROM, KINDS, schema_of


def add(commands: _SubParsersAction) -> None:
    parser = add_command(
        commands, "schema", "print the JSON schema of an output",
        ["csd schema", "csd schema sample"], "formats.md",
    )  # fmt: skip
    parser.add_argument(
        "name",
        nargs="?",
        choices=KINDS,
        help="name of a format; without it, all formats are listed",
    )
    parser.set_defaults(run=_schema)


def _schema(args: Namespace) -> int:
    if args.name is None:
        print("\n".join(f"{name:8}  {FROM[name]}" for name in KINDS))
    else:
        print(json.dumps(schema_of(args.name), indent=1))
    return 0
