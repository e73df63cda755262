"""JSON of clients and for clients, in parts between which other threads run.

json's parser and writer in C hold Python's lock until they end, seconds for some megabytes, and the
engine's thread and other clients wait for it.
"""

import json
import json.scanner
from typing import Any

# bytes that are parsed at once
AT_ONCE = 1 << 14
# levels of an answer that are written one by one: choices, log-probabilities, tokens and their
# likely ones
LEVELS = 5

# json's parser in Python
_scanners: Any = json.scanner
_decoder: Any = json.JSONDecoder()
_decoder.scan_once = _scanners.py_make_scanner(_decoder)


def loads(data: bytes) -> Any:
    """The value of a JSON text, as `json.loads` reads it. Raises ValueError and RecursionError."""
    if len(data) <= AT_ONCE:
        return json.loads(data)
    return _decoder.decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def dumps(value: Any, levels: int = LEVELS) -> str:
    """The JSON text of a value, as `json.dumps` writes it."""
    if levels and isinstance(value, dict):
        pairs = (f"{json.dumps(key)}: {dumps(x, levels - 1)}" for key, x in value.items())
        return "{" + ", ".join(pairs) + "}"
    if levels and isinstance(value, list):
        return "[" + ", ".join([dumps(x, levels - 1) for x in value]) + "]"
    return json.dumps(value)
