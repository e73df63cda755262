"""Names that a chat template reads, which are the only ones that a client may set.

Any other argument of `apply_chat_template` could change what the tokenizer does: `chat_template`
even replaces the template by a program of the client.
"""

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from csd.serve.http.errors import Refused
from csd.utils.check import shown


def read_names(tokenizer: Any) -> frozenset[str]:
    """Names that the tokenizer's chat template reads, or one of its named templates."""
    return frozenset(name for text in _templates(tokenizer) for name in _undeclared(text))


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template, or all of its named ones; "" without any."""
    return "\n".join(_templates(tokenizer))


def _templates(tokenizer: Any) -> list[str]:
    templates = getattr(tokenizer, "chat_template", None)
    texts = templates.values() if isinstance(templates, Mapping) else [templates]
    return [text for text in texts if isinstance(text, str)]


def check_template_names(given: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises Refused for a name in chat_template_kwargs that a client cannot set."""
    # the tokenizer sets the names of its special tokens
    own = {*_arguments(), *(getattr(tokenizer, "special_tokens_map", None) or ())}
    known = sorted(read_names(tokenizer) - own)
    for name, value in given.items():
        if name not in known:
            raise Refused(
                f"chat_template_kwargs must not have {shown(name)}, got {shown(value)}: the "
                f"model's chat template reads {', '.join(known) or 'no names of clients'}",
                param="chat_template_kwargs",
            )


@lru_cache
def _arguments() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    function = PreTrainedTokenizerBase.apply_chat_template
    # messages: transformers' name of the conversation within a template; the others are functions
    of_template = {"messages", "raise_exception", "strftime_now"}
    tokens = PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES
    return frozenset({*inspect.signature(function).parameters, *of_template, *tokens})


# the model's own templates, of which a server has a few
@lru_cache(maxsize=16)
def _undeclared(text: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag with which templates mark an assistant's tokens."""

        def __init__(self, environment: Environment):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    try:
        return frozenset(find_undeclared_variables(environment.parse(text)))
    # the tokenizer cannot render such a template either
    except TemplateError:
        return frozenset()
