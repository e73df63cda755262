"""Grammars of samples: JSON schemas, regular expressions and Lark grammars, by llguidance.

`dead_parts` finds the parts of a schema because of which a text has no continuation.
A grammar is read token by token, so a text may begin something that it cannot complete: with a
property that is also the only key of a pattern, beside `additionalProperties: false`, a comma is
allowed after the property, but no key.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import Any

from csd.engine.options.thinking import of_tokenizer, split
from csd.models.text.token_bytes import token_bytes
from csd.utils.check import shown
from csd.utils.lazy import check_installed

# fields of `SamplingParams`; a call sets at most one of them
GRAMMARS = ("json_schema", "regex", "grammar")

# limits spaces between parts of a JSON text, since a model might write spaces for ever
SPACE = {"whitespace_pattern": "[ \\t\\n]{0,40}"}

# states of a grammar's lexer, about 400 bytes each, which a sample's tokens add
LEXER_STATES = 50_000

# begins the message of a panic, which takes seconds: it prints a trace of its stack
PANIC = "it panics:"

# characters that are read to find the faulty part of a schema, about a second
PLACE_CHARACTERS = 1 << 20

# grammars whose digests are kept
KEPT = 1024


def check_schema(name: str, value: Any) -> str:
    """Returns a JSON schema as text. Takes a dict, a text or a class of pydantic.

    Raises TypeError or ValueError for any other value.
    """
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name} must be JSON, got {shown(value)}: {error}") from error
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a dict, a JSON string or a pydantic class, got {shown(value)}"
        )
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold only JSON values: {error}") from error


def check_text(name: str, value: Any) -> str:
    """Returns `value`. Raises TypeError or ValueError unless it is a non-empty text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be a string, got {shown(value)}: {error}") from error
    return value


def has_grammar(params: Any) -> bool:
    """True if a sample's parameters include a grammar."""
    return any(getattr(params, name) is not None for name in GRAMMARS)


def check_one(options: Mapping[str, Any]) -> None:
    """Raises ValueError if more than one grammar is given."""
    names = [name for name in GRAMMARS if options.get(name) is not None]
    if len(names) > 1:
        raise ValueError(f"only one of {' and '.join(names)} may be given")


def source(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Name of the argument that gives a grammar, and the grammar in llguidance's format."""
    for name in GRAMMARS:
        if arguments.get(name) is not None:
            check_installed("llguidance", "grammar", name)
            from llguidance import LLMatcher

            value = arguments[name]
            make: dict[str, Callable[..., str]] = {
                "json_schema": _of_schema,
                "regex": LLMatcher.grammar_from_regex,
                "grammar": LLMatcher.grammar_from_lark,
            }
            try:
                return name, make[name](value)
            except ValueError as error:
                raise ValueError(f"{name} must be accepted by llguidance: {error}") from error
    return None


def _of_schema(text: str) -> str:
    from llguidance import LLMatcher

    # a schema's own options take precedence
    options: Any = None if "x-guidance" in json.loads(text) else SPACE
    return LLMatcher.grammar_from_json_schema(text, options)


class Recent:
    """Digests of the grammars that were added last or asked for, at most `KEPT`."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            if digest not in self._digests:
                return False
            self._digests.move_to_end(digest)
            return True

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._digests[digest] = None
            if len(self._digests) > KEPT:
                self._digests.popitem(last=False)


@of_tokenizer
def _valid(tokenizer: Any) -> Recent:
    """The valid grammars. Matchers are not kept: copies share their lexer, and one that has used up
    its states would fail for other requests."""
    return Recent()


def check_grammar(options: Mapping[str, Any], tokenizer: Any, vocab: int) -> None:
    """Raises ValueError for a grammar that llguidance rejects; in a schema, with the place."""
    grammar = source(options)
    if grammar is None:
        return
    name, text = grammar
    if tokenizer is None:
        raise ValueError(f"{name} needs a tokenizer: pass tokenizer=")
    # all prompts of a call have the same grammar
    digest, valid = hashlib.sha256(f"{vocab} {text}".encode()).digest(), _valid(tokenizer)
    if digest in valid:
        return
    message = _error_of(text, reader_of(tokenizer, vocab))
    if message is not None:
        located = name == "json_schema" and not message.startswith(PANIC)
        where = f"; at {_place(options[name])}" if located else ""
        raise ValueError(f"{name} must be accepted by llguidance{where}: {message}")
    valid.add(digest)


def _error_of(text: str, reader: Any = None) -> str | None:
    """First line of what llguidance reports about a grammar that it rejects; None if it is valid.

    With a reader the grammar is also compiled, which has limits of its own.
    """
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, reader)
        if failed:
            return messages[0].strip()
        matcher = None if reader is None else _compiled(text, reader)
        if matcher is not None and matcher.is_error():
            return matcher.get_error().partition("\n")[0]
    # a panic of llguidance is no `Exception`
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return f"{PANIC} {error}"
    return None


def _compiled(text: str, reader: Any) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=LEXER_STATES)
    return LLMatcher(reader, text, log_level=0, limits=limits)


def _place(text: str) -> str:
    """JSON pointer of a part of a schema that llguidance rejects, the innermost if it is short."""
    whole = json.loads(text)
    pointer, inside, left = "", whole, PLACE_CHARACTERS
    # references point into the whole schema
    shared = {k: v for k, v in whole.items() if k in ("$defs", "definitions")}
    while isinstance(inside, dict):
        for step, _, part in parts_of(inside):
            schema = json.dumps(shared | part)
            left -= len(schema)
            if left < 0:
                return pointer or "its top"
            if _error_of(_of_schema(schema)) is not None:
                pointer, inside = pointer + step, part
                break
        else:
            break
    return pointer or "its top"


def parts_of(schema: dict) -> Iterator[tuple[str, tuple, dict]]:
    """Yield the JSON pointer, the keys and the content of each direct subschema."""
    for key, value in schema.items():
        listed: Any = ()
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            listed = value.items() if isinstance(value, dict) else ()
        elif isinstance(value, list):
            listed = enumerate(value)
        elif isinstance(value, dict):
            yield f"/{_escaped(key)}", (key,), value
        for name, inside in listed:
            if isinstance(inside, dict):
                yield f"/{_escaped(key)}/{_escaped(name)}", (key, name), inside


def _escaped(name: str | int) -> str:
    """Escape a name for use as a part of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


def matcher_of(params: Any, tokenizer: Any, vocab: int) -> Any:
    """Returns a matcher at the beginning of a sample; None without a grammar."""
    grammar = source({name: getattr(params, name) for name in GRAMMARS})
    if grammar is None:
        return None
    return _compiled(grammar[1], reader_of(tokenizer, vocab))


@of_tokenizer
def reader_of(tokenizer: Any, vocab: int) -> Any:
    """llguidance's version of a tokenizer; making one reads the whole vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    pieces: _Pieces | _Spelled = _Pieces(tokenizer, vocab)
    if getattr(tokenizer, "is_fast", False):
        from llguidance.hf import from_tokenizer

        vocab = max(vocab, len(tokenizer))
        # fails if tokens are neither bytes nor pieces with byte fallback: then those are read
        with suppress(Exception):
            pieces = _Spelled(tokenizer, from_tokenizer(tokenizer, n_vocab=vocab))
    return LLTokenizer(TokenizerWrapper(pieces), n_vocab=len(pieces.tokens))


class _Spelled:
    """Adapter of a fast tokenizer for llguidance's `TokenizerWrapper`, that spells every text.

    A text that is also a special token of `reader`, as Qwen's `<tool_call>`, is one token to the
    tokenizer. A grammar of texts does not accept it, so such a text is tokenized without these.

    reader: llguidance's own version of the tokenizer.
    """

    def __init__(self, tokenizer: Any, reader: Any):
        self._tokenizer, self._readers = tokenizer, [reader]
        ids = range(reader.vocab_size)
        self.eos_token_id, self.bos_token_id = reader.eos_token, None
        self.tokens = [reader.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if reader.is_special_token(i)]
        self.special = {*self.special_token_ids}

    def __call__(self, text: bytes) -> list[int]:
        ids = [*self._readers[0].tokenize_bytes(text)]
        if not _spells(ids, text, self):
            if len(self._readers) == 1:
                self._readers.append(self._without_special())
            ids = [*self._readers[1].tokenize_bytes(text)]
        return ids if _spells(ids, text, self) else _longest(text, self) or ids

    def _without_special(self) -> Any:
        """llguidance's version of the tokenizer, without its special tokens."""
        from llguidance import LLTokenizer

        made = json.loads(self._tokenizer.backend_tokenizer.to_str())
        made |= dict(padding=None, truncation=None)
        made["added_tokens"] = [x for x in made["added_tokens"] if x["id"] not in self.special]
        return LLTokenizer(
            json.dumps(made), n_vocab=len(self.tokens), eos_token=self.eos_token_id, slices=[]
        )


def _spells(ids: list[int], text: bytes, pieces: "_Spelled | _Pieces") -> bool:
    """True if `ids` are tokens of texts with the bytes of the text; a tokenizer may add a space."""
    return pieces.special.isdisjoint(ids) and b"".join(pieces.tokens[i] for i in ids) == text


def _longest(text: bytes, pieces: "_Spelled | _Pieces") -> list[int]:
    """Tokens of texts alone, longest first; [] if these do not have all bytes."""
    listed = [*enumerate(pieces.tokens)]
    return split(text, {x: i for i, x in reversed(listed) if x and i not in pieces.special})


_NAME = re.compile(r"<[^<>\s]+>")


class _Pieces:
    """Adapter of a tokenizer of whole characters for llguidance's `TokenizerWrapper`."""

    def __init__(self, tokenizer: Any, vocab: int):
        end = getattr(tokenizer, "eos_token_id", None)
        special: set[int] = {*(getattr(tokenizer, "all_special_ids", None) or ())}
        special |= set() if end is None else {end}
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        # as llguidance does: an added token with such a name is no part of a text
        named = {i: name for name, i in added.items() if _NAME.fullmatch(name)}
        special |= {*named}
        size = min(vocab, len(tokenizer)) if hasattr(tokenizer, "__len__") else vocab
        self._tokenizer = tokenizer
        self.eos_token_id = size if end is None else end
        self.bos_token_id = None
        of = token_bytes(tokenizer).of
        # special and missing tokens get bytes that occur in no text: 255, and the name in grammars
        self.tokens = [
            (None if i in special or i >= size else of(i))
            or b"\xff" + named.get(i, f"<{i}>").encode()
            for i in range(vocab)
        ]
        self.special, self.special_token_ids = special, sorted(special)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if _spells(ids, text.encode(), self) else _longest(text.encode(), self) or ids


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
