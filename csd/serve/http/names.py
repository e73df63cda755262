"""Names of the engine's options in requests, and in errors about them."""

import re
from collections.abc import Mapping
from typing import Any

from csd.engine.options import Options
from csd.utils.arguments import options_of

# fields of both endpoints -> options of the engine
SAMPLING = {
    field: name
    for name, (_, option) in options_of(Options).items()
    for field in option.fields.split()
}
# fields beside those of options that errors begin with
OTHERS = ("prompt", "messages", "chat_template_kwargs", "tools")
PLURALS = {"must": "must", "cannot": "cannot", "does": "do", "is not": "are not"}


def as_fields(message: str, body: Mapping[str, Any] | None = None) -> str:
    """An error of the engine with the names of fields in place of its options'.

    body: of the request; where an option has two names, the error has the one that is in it.
    """
    # else of several fields of an option the first
    names = {option: name for name, option in reversed(SAMPLING.items())}
    names |= {o: name for name, o in SAMPLING.items() if body and body.get(name) is not None}
    names = {option: name for option, name in names.items() if option != name}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[1]], message)


def as_messages(message: str) -> str:
    """An error about a prompt, in the terms of a chat completion's body."""
    for verb, plural in PLURALS.items():
        message = re.sub(rf"^prompt {verb}\b", f"messages {plural}", message)
    # the first place within the messages
    return re.sub(r"\b(as|have) '(?=\[\d)", r"\1 'messages", message, count=1)


def named(message: str) -> str | None:
    """The field that an error begins with."""
    first = re.match(r"\w*", message)
    return first[0] if first and first[0] in (*SAMPLING, *OTHERS) else None
