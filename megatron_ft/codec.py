"""JSON for frozen dataclasses and named tuples, and back by their type hints: values that go to other processes and into
files.

A dataclass is an object with its fields, a named tuple a list, a set a sorted list; the keys of a mapping are text. A class
with ``to_json`` and ``from_json`` of its own is asked for them (``types.View``). A class that is served here says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, set[type]] = {int: {int}, float: {float, int}, str: {str}, bool: {bool}, NoneType: {NoneType}}
"""True is no number."""
_ATOMS, _LISTS = tuple(_PLAIN), (tuple, list)
STAYS = "stays"
"""Metadata of a field that is not encoded as the others are: who decodes has its default."""

Value = TypeVar("Value")


def encode(value: Any) -> Any:
    """Return ``value`` as JSON. Raises ``TypeError`` for a value that has no such form."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, _LISTS):  # thousands of groups
        return list(value) if set(map(type, value)) <= _PLAIN.keys() else [encode(inner) for inner in value]
    if isinstance(value, Mapping):
        return {str(key): encode(inner) for key, inner in value.items()}
    if isinstance(value, Set):
        return sorted(map(encode, value))
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return encode_fields(value)
    raise TypeError(f"{value!r} has no form in JSON")


def encode_fields(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON, also one with a ``to_json`` of its own."""
    kind: Any = type(value)
    return {name: encode(getattr(value, name)) for name in _fields(kind)[0]}


def decode(kind: type[Value], raw: Any) -> Value:
    """Return the value of that type (inverse of :func:`encode`). A field that has a default may be missing.

    Raises ``ValueError`` that names the field, its value and the type that it must have.
    """
    value: Value = _decode(kind, raw)
    return value


def _decode(hint: Any, raw: Any) -> Any:
    if hint is Any or type(raw) in _PLAIN.get(hint, ()):
        return raw
    origin, args = _parts(hint)
    if origin in (Union, UnionType):
        for arg in args:
            try:
                return _decode(arg, raw)
            except ValueError:
                continue
    elif origin is Literal and raw in args:
        return raw
    elif origin in (tuple, list, Sequence, frozenset) and isinstance(raw, _LISTS):
        if origin is not tuple or args[-1] is ...:
            plain = set(map(type, raw)) <= _PLAIN.get(args[0], set())
            return (tuple if origin is Sequence else origin)(raw if plain else [_decode(args[0], one) for one in raw])
        if len(raw) == len(args):
            return tuple(map(_decode, args, raw))
    elif origin in (dict, Mapping) and isinstance(raw, Mapping):
        return {args[0](key): _decode(args[1], inner) for key, inner in raw.items()}
    elif hasattr(hint, "from_json"):
        return hint.from_json(raw)
    elif hasattr(hint, "_fields") and isinstance(raw, _LISTS) and len(raw) <= len(hint._fields):
        return decode_fields(hint, dict(zip(hint._fields, raw, strict=False)))
    elif isinstance(hint, type) and is_dataclass(hint) and isinstance(raw, Mapping):
        return decode_fields(hint, raw)
    raise ValueError(f"{raw!r} is no {getattr(hint, '__name__', hint)}")


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the type hint of each field that is encoded, and those that have no default."""
    hints = get_type_hints(kind)
    if not is_dataclass(kind):
        return {name: hints[name] for name in kind._fields}, set(kind._fields) - kind._field_defaults.keys()
    travel = [one for one in fields(kind) if STAYS not in one.metadata]
    needed = {one.name for one in travel if one.default is MISSING and one.default_factory is MISSING}
    return {one.name: hints[one.name] for one in travel}, needed


def decode_fields(kind: type[Value], raw: Mapping[str, Any]) -> Value:
    """Return the value with these fields, also of a class with a ``from_json`` of its own. Raises as :func:`decode`."""
    hints, needed = _fields(kind)  # type: ignore[arg-type]  # a type can be hashed
    if strange := raw.keys() - hints.keys():
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(strange))}")
    if missing := needed - raw.keys():
        raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
    found = {}
    for name, inner in raw.items():
        try:
            found[name] = _decode(hints[name], inner)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**found)
