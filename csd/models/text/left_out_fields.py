"""Fields of messages that a chat template leaves out: refused, or named once in the log."""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

LOG = logging.getLogger("csd")

Path = tuple[str | int, ...]
# renders messages; None where the template raises
Render = Callable[[list[dict]], str | None]

# keys whose values link or classify, and are no words
_LABELS = frozenset({"role", "type", "id", "index", "tool_call_id"})


def left_out(messages: list[dict], text: str | None, render: Render) -> list[Path]:
    """Paths of the fields with words that do not change the rendered `text` when they change.

    All fields are changed in one rendering, and those that do not appear in it again in others.
    """
    if text is None:
        return []
    marks = {path: f"field{i}mark" for i, path in enumerate(_words(messages))}
    together = render(_changed(messages, marks)) or ""
    return _without_effect(
        [path for path, mark in marks.items() if mark not in together], messages, text, render
    )


def _without_effect(
    paths: list[Path], messages: list[dict], text: str, render: Render
) -> list[Path]:
    """The fields, of some, that do not change the rendered text, by bisection."""
    if not paths or render(_changed(messages, dict.fromkeys(paths, "mark"))) == text:
        return paths
    if len(paths) == 1:
        return []
    middle = len(paths) // 2
    first = _without_effect(paths[:middle], messages, text, render)
    return first + _without_effect(paths[middle:], messages, text, render)


def refuse_left_out(messages: list[dict], paths: list[Path]) -> None:
    """Raises ValueError for a content, and for a tool call, that the template leaves out.

    Other fields, parts of a shown call, and the content beside one are named in the log.
    """
    lost, words = set(paths), [*_words(messages)]
    for path in paths:
        index, field = int(path[0]), str(path[1])
        role = messages[index]["role"]
        calls = [p for p in words if p[:2] == (index, "tool_calls")]
        call = [p for p in calls if p[:3] == path[:3]]
        if field == "content" and role not in ("user", "assistant"):
            raise ValueError(
                f"must have roles that the chat template supports, got {role!r} as "
                f"'[{index}].role', whose message it leaves out"
            )
        if lost.issuperset(calls if field == "content" else call) and (call or field == "content"):
            raise ValueError(
                f"must have fields that the chat template shows, got '{_named(path)}', which it "
                "leaves out: write these words in the content of a message that it shows, or pass "
                "a template that shows them as chat_template_kwargs={'chat_template': ...}"
            )
        names = ".".join(key for key in path[1:] if isinstance(key, str))
        warn_once(
            "the chat template leaves out %r of a message of role %r, so no model reads it",
            names,
            str(role),
        )


@lru_cache(maxsize=1024)
def warn_once(message: str, *arguments: str) -> None:
    """Write a line to the log, unless it was written before."""
    LOG.warning(message, *arguments)


def _words(messages: list[dict]) -> Iterator[Path]:
    """Paths of the values in messages that carry words, or arguments of tools."""
    for i, message in enumerate(messages):
        yield from _leaves(message, (i,), False)


def _leaves(value: Any, path: Path, argument: bool) -> Iterator[Path]:
    # empty arguments are values too: they show a call whose name is not shown
    if isinstance(value, dict) and (value or not argument):
        for key, inner in value.items():
            if argument or key not in _LABELS:
                yield from _leaves(inner, (*path, key), argument or key == "arguments")
    elif isinstance(value, list) and (value or not argument):
        for i, inner in enumerate(value):
            yield from _leaves(inner, (*path, i), argument)
    elif argument or (isinstance(value, str) and value.strip()):
        yield path


def _changed(messages: list[dict], marks: dict[Path, str]) -> list[dict]:
    """Messages with a word appended to each of these texts, or in the place of another value."""
    changed = copy.deepcopy(messages)
    for path, mark in marks.items():
        parent: Any = changed
        for key in path[:-1]:
            parent = parent[key]
        value = parent[path[-1]]
        if isinstance(value, dict):
            parent[path[-1]] = {mark: mark}
        else:
            parent[path[-1]] = f"{value} {mark}" if isinstance(value, str) else mark
    return changed


def _named(path: Path) -> str:
    """A path as in an error: [1].tool_calls[0].function.name."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
