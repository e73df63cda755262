"""Bytes of each token of a vocabulary, read from the vocabulary and not from decoded text."""

import json
import re
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_READ: "weakref.WeakKeyDictionary[Any, TokenBytes]" = weakref.WeakKeyDictionary()


class TokenBytes:
    """Bytes of tokens inside a text, by the steps of a tokenizer's decoder.

    A token may be a part of a character, which has no text of its own. Tokens of a tokenizer
    without such a decoder are decoded behind another one, and parts of characters have no bytes.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._steps = _steps(tokenizer)
        names = {step["type"] for step in self._steps}
        self._byte_level = "ByteLevel" in names
        self._fallback = "ByteFallback" in names
        self._of: dict[int, bytes | None] = {}

    def of(self, token: int) -> bytes | None:
        """Bytes of a token; None for a part of a character that the vocabulary does not show."""
        if token not in self._of:
            self._of[token] = self._read(token)
        return self._of[token]

    def text(self, token: int) -> str:
        """Text of a token inside a longer text, with U+FFFD for parts of characters."""
        read = self.of(token)
        return "\ufffd" if read is None else read.decode("utf-8", "replace")

    def is_byte(self, token: int) -> bool:
        """True if the token is one byte of a run that is decoded as a whole (`<0xNN>`)."""
        return self._fallback and _BYTE.fullmatch(self._name(token) or "") is not None

    def _name(self, token: int) -> str | None:
        try:
            return self._tokenizer.convert_ids_to_tokens(token)
        # ids beyond the vocabulary
        except (IndexError, KeyError, OverflowError, TypeError, ValueError):
            return None

    def _read(self, token: int) -> bytes | None:
        name = self._name(token) if self._steps else None
        if name is None:
            text = self._behind_another(token)
            return None if "\ufffd" in text else text.encode()
        if self._byte_level:
            mapped = [byte_alphabet().get(c) for c in name]
            return name.encode() if None in mapped else bytes(x for x in mapped if x is not None)
        if self._fallback and (match := _BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for step in self._steps:
            name = _apply(step, name)
        return name.encode()

    def _behind_another(self, token: int) -> str:
        # a tokenizer may strip the first space of a text, so the token is decoded behind another
        decode = self._tokenizer.decode
        before, both = decode([0]), decode([0, token])
        return both.removeprefix(before) if both.startswith(before) else decode([token])


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The `TokenBytes` of a tokenizer, made once."""
    try:
        return _READ.get(tokenizer) or _READ.setdefault(tokenizer, TokenBytes(tokenizer))
    # an object without a hash or without weak references
    except TypeError:
        return TokenBytes(tokenizer)


@cache
def byte_alphabet() -> dict[str, int]:
    """The byte of each character with which byte-level vocabularies are written.

    Printable characters of Latin-1 stand for themselves, the other bytes for U+0100 and beyond.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _steps(tokenizer: Any) -> list[dict]:
    """Steps of the decoder of a tokenizer of the library `tokenizers`; empty for others."""
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    try:
        state = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return []
    steps = [*_flat(state)]
    return steps if all(step["type"] in _KNOWN for step in steps) else []


def _flat(state: dict) -> Iterator[dict]:
    if state.get("type") == "Sequence":
        for step in state["decoders"]:
            yield from _flat(step)
    else:
        yield state


# steps that concern a text's ends or neighbours change no token inside a text
_KNOWN = {
    "ByteLevel",
    "ByteFallback",
    "Replace",
    "Metaspace",
    "WordPiece",
    "BPEDecoder",
    "Fuse",
    "Strip",
}


def _apply(step: dict, name: str) -> str:
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"]:
        return name.replace(step["pattern"]["String"], step["content"])
    if kind == "Metaspace":
        return name.replace(step["replacement"], " ")
    if kind == "BPEDecoder":
        return name.replace(step["suffix"], " ")
    if kind == "WordPiece":
        prefix = step["prefix"]
        return name[len(prefix) :] if name.startswith(prefix) else f" {name}"
    return name
