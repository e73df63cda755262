"""Parts of a JSON schema because of which a text has no continuation.

A grammar is read token by token, so a text may begin something that it cannot complete: with a
property that is also the only key of a pattern, beside `additionalProperties: false`, a comma is
allowed after the property, but no key.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any

from csd.engine.options.grammar import matcher_of, parts_of

# characters to compile, some hundredths of a second: the search compiles the schema once for each
# part, and all samples in flight wait for it
SEARCHED = 1 << 15
PATTERNS = "patternProperties"


def dead_parts(params: Any, tokenizer: Any, vocab: int, tokens: list[int]) -> list[str]:
    """JSON pointers of the parts of a schema without which the text would not end in a dead end.

    tokens: those of the sample. The schema without such a part allows a next token, or it refuses
    the text as late as possible: a part that an earlier piece of the text needs is not returned.
    Empty if there is no such part, the schema is long, or the grammar applies only after a thought.
    """
    if params.json_schema is None or params.max_thinking_tokens is not None:
        return []
    schema = json.loads(params.json_schema)
    max_parts = SEARCHED // len(params.json_schema)
    parts = [*islice(_pointers(schema), max_parts + 1)]
    if len(parts) > max_parts:
        return []
    read: dict[str, int] = {}
    for pointer, keys in parts:
        other = params.replace(json_schema=_without(schema, keys))
        read[pointer] = _read(other, tokenizer, vocab, tokens)
    patterns = {p: count for p, count in read.items() if p.split("/")[-2] == PATTERNS and count}
    # a key that no property and no pattern has left is the pattern's
    read = patterns or read
    longest = max(read.values(), default=0)
    pointers = [pointer for pointer, count in read.items() if count == longest > 0]
    # a part goes with the parts around it
    return [p for p in pointers if not any(other.startswith(f"{p}/") for other in pointers)]


def _pointers(schema: dict, above: str = "", keys: tuple = ()) -> Iterator[tuple[str, tuple]]:
    """Yield the JSON pointer, and the keys, of each part of a schema."""
    for pointer, path, inside in parts_of(schema):
        yield above + pointer, (*keys, *path)
        yield from _pointers(inside, above + pointer, (*keys, *path))


def _without(schema: dict, keys: tuple) -> str:
    made = deepcopy(schema)
    inside = made
    for key in keys[:-1]:
        inside = inside[key]
    del inside[keys[-1]]
    if isinstance(inside, dict) and not inside and len(keys) > 1:
        # an empty list of patterns or properties may be refused where none is not
        return _without(schema, keys[:-1])
    return json.dumps(made)


def _read(params: Any, tokenizer: Any, vocab: int, tokens: list[int]) -> int:
    """Number of tokens that a schema allows, plus one if it then allows a next one.

    0 if it is refused, or if the text ends in a dead end here too.
    """
    matcher = matcher_of(params, tokenizer, vocab)
    if matcher.is_error():
        return 0
    count = matcher.try_consume_tokens(tokens)
    if count < len(tokens):
        return count
    return count + 1 if matcher.is_accepting() or any(matcher.compute_bitmask()) else 0
