"""JSON for frozen dataclasses and named tuples, and back by their type hints: values that go to other processes and into
files.

A dataclass is an object with its fields, a named tuple a list, a set a sorted list; the keys of a mapping are text. A class
with ``to_json`` and ``from_json`` of its own is asked for them (``types.View``). A class that is served here says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_PLAIN = {int: (int,), float: (float, int), str: (str,), bool: (bool,), NoneType: (NoneType,)}
_ATOMS = frozenset(_PLAIN)
STAYS = "stays"
"""Metadata of a field that is not encoded: who decodes has its default."""

Value = TypeVar("Value")


def encode(value: Any) -> Any:
    """Return ``value`` as JSON. Raises ``TypeError`` for a value that has no such form."""
    if isinstance(value, str | int | float | NoneType):
        return value
    if isinstance(value, Mapping):
        return {str(key): encode(inner) for key, inner in value.items()}
    if isinstance(value, Set):
        return sorted(map(encode, value))
    if isinstance(value, tuple | list):
        return list(value) if _ATOMS.issuperset(map(type, value)) else [encode(inner) for inner in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return {one.name: encode(getattr(value, one.name)) for one in fields(value) if STAYS not in one.metadata}
    raise TypeError(f"{value!r} has no form in JSON")


def decode(kind: type[Value], raw: Any) -> Value:
    """Return the value of that type (inverse of :func:`encode`). A field that has a default may be missing.

    Raises ``ValueError`` that names the field, its value and the type that it must have.
    """
    read: Callable[[Any], Value] = _reader(kind)  # type: ignore[arg-type]  # a type is hashable
    return read(raw)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return the function that decodes values with this type hint."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda raw: raw
    if hint in _PLAIN:
        return partial(_plain, hint)
    if origin in (Union, UnionType):
        return partial(_one_of, hint, [_reader(arg) for arg in args])
    if origin is tuple and args[-1] is not ...:
        return partial(_listed, hint, tuple, [_reader(arg) for arg in args], len(args))
    if origin in (tuple, list, Sequence, frozenset):
        make = tuple if origin is Sequence else origin
        return partial(_several, hint, make, _reader(args[0]), frozenset(_PLAIN.get(args[0], ())))
    if origin in (dict, Mapping):
        key, inner = args[0], _reader(args[1])
        return lambda raw: {key(name): inner(one) for name, one in _typed(raw, Mapping, hint).items()}
    if hasattr(hint, "from_json"):
        return partial(hint.from_json)
    hints = get_type_hints(hint)
    if is_dataclass(hint):
        travel = [one for one in fields(hint) if STAYS not in one.metadata]
        needed = {one.name for one in travel if one.default is MISSING and one.default_factory is MISSING}
        return partial(_object, hint, {one.name: _reader(hints[one.name]) for one in travel}, needed)
    readers = [_reader(hints[name]) for name in hint._fields]
    return partial(_listed, hint, lambda found: hint(*found), readers, len(readers) - len(hint._field_defaults))


def _typed(raw: Any, types: Any, hint: Any) -> Any:
    if not isinstance(raw, types):
        raise ValueError(f"{raw!r} is no {getattr(hint, '__name__', hint)}")
    return raw


def _plain(hint: type, raw: Any) -> Any:
    return raw if type(raw) in _PLAIN[hint] else _typed(raw, (), hint)  # True is no number


def _one_of(hint: Any, readers: Sequence[Callable[[Any], Any]], raw: Any) -> Any:
    for read in readers:
        try:
            return read(raw)
        except ValueError:
            continue
    return _typed(raw, (), hint)


def _several(hint: Any, make: Callable[..., Any], each: Callable[[Any], Any], fine: frozenset[type], raw: Any) -> Any:
    known = fine.issuperset(map(type, _typed(raw, list | tuple, hint)))  # thousands of groups
    return make(raw if known else map(each, raw))


def _listed(hint: Any, make: Callable[..., Any], readers: Sequence[Callable[[Any], Any]], least: int, raw: Any) -> Any:
    if not least <= len(_typed(raw, list | tuple, hint)) <= len(readers):
        _typed(raw, (), hint)
    return make(read(one) for read, one in zip(readers, raw, strict=False))


def _object(kind: Any, readers: Mapping[str, Callable[[Any], Any]], needed: Set[str], raw: Any) -> Any:
    _typed(raw, Mapping, kind)
    if strange := raw.keys() - readers.keys():
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(strange))}")
    if missing := needed - raw.keys():
        raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
    found = {}
    for name, inner in raw.items():
        try:
            found[name] = readers[name](inner)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**found)
