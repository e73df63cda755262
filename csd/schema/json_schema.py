"""JSON schema of a type as `csd.schema.check` takes it."""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, is_typeddict

from csd.schema.check import AtLeast, Between, fields_of

_SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"},
    str: {"type": "string"}, NoneType: {"type": "null"}, None: {"type": "null"},
    dict: {"type": "object"}, list: {"type": "array"}, Any: {},
}  # fmt: skip


def json_schema(kind: Any) -> dict[str, Any]:
    """Schema of values that fit `kind`; strings in an `Annotated` become descriptions."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return json_schema(args[0])
    if origin is Annotated:
        found = json_schema(args[0])
        for rule in args[1:]:
            found |= _rule(rule)
        return found
    if origin in (Union, UnionType):
        return {"anyOf": [json_schema(a) for a in args]}
    if origin is Literal:
        return {"enum": [*args]}
    if origin is list:
        return {"type": "array", "items": json_schema(args[0])}
    if origin is tuple:
        entries = [json_schema(a) for a in args]
        return {"type": "array", "prefixItems": entries, "items": False, "minItems": len(entries)}
    if origin is dict:
        return {"type": "object", "additionalProperties": json_schema(args[1])}
    if is_typeddict(kind):
        properties = {name: json_schema(hint) for name, hint in fields_of(kind).items()}
        required = [name for name in properties if name in kind.__required_keys__]
        return {"type": "object", "properties": properties, "required": required}
    return dict(_SCALARS[kind])


def _rule(rule: Any) -> dict[str, Any]:
    if isinstance(rule, str):
        return {"description": rule}
    if isinstance(rule, AtLeast):
        return {"minItems": rule.entries}
    assert isinstance(rule, Between)
    return {"minimum": rule.low} | ({"maximum": rule.high} if rule.high < float("inf") else {})
