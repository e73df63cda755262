"""A griffe extension: the arguments that a docstring describes become a list.

model: a `transformers` model,           ->    - `model`: a `transformers` model,
    or a folder.                                   or a folder.
"""

import re
from typing import Any

import griffe

ITEM = re.compile(r"(\w+(?:, \w+)*): ")


def listed(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        match = ITEM.match(line)
        if match is None:
            lines.append(line)
            continue
        if lines and lines[-1] and not lines[-1].startswith(("- ", "    ")):
            lines.append("")
        lines.append(f"- `{match[1]}`: {line[match.end() :]}")
    return "\n".join(lines)


class DocstringLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
