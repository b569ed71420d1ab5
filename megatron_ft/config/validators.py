"""Rules for single settings: each refuses a value with its name, the value and the rule.

pydantic is not used. Most checks relate several settings to each other or to the number of groups, and name a remedy;
those would remain. These rules are shorter than a translation of pydantic's errors into the same messages would be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf, isfinite
from typing import Any, Final, Literal

from megatron_ft.errors import ConfigError

AUTO: Final = "auto"
Auto = Literal["auto"]


@dataclass(frozen=True)
class Rule:
    """A condition on one value, and how a message names it after "it must be". ``kind`` converts an accepted value."""

    words: str
    accepts: Callable[[Any], bool]
    kind: type | None = None

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value. Raises ``ConfigError`` where the rule does not accept it."""
        if not self.accepts(value):
            raise ConfigError(f"{name} is {value!r}; it must be {self.words}")
        return value if self.kind is None or value in (AUTO, None) else self.kind(value)


def setting(default: Any, rule: Any) -> Any:
    """A field of a dataclass: ``rule`` takes its name and a value, and returns the value in force. ``default``: as for
    ``dataclasses.field``. Of settings of a run, its words, or else its docstring, say in docs/settings.md which values it
    accepts (``tools/settings.py``)."""
    return field(default=default, metadata={"rule": rule})


def check(value: Any, where: str = "") -> None:
    """Raise ``ConfigError`` for a field of a dataclass whose rule refuses its value. ``where``: what stands before its name
    in the message."""
    for one in fields(value):
        found, name = getattr(value, one.name), f"{where}{one.name}"
        if is_dataclass(found):
            check(found, f"{name}.")
        elif "rule" in one.metadata:
            one.metadata["rule"](name, found)


TRUE_OR_FALSE = Rule("true or false", lambda value: isinstance(value, bool))
STRING = Rule("a string", lambda value: isinstance(value, str))


def whole_number(least: int, most: float = inf) -> Rule:
    """Accept whole numbers from ``least`` to ``most``."""
    return Rule(f"a whole number {_bounds(least, most)}", lambda value: type(value) is int and least <= value <= most)


def _bounds(least: float, most: float) -> str:
    return f">= {least:g}" if most == inf else f"from {least:g} to {most:g}"


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def number(least: float, most: float = inf) -> Rule:
    """Accept finite numbers from ``least`` to ``most``."""
    return Rule(f"a number {_bounds(least, most)}", lambda value: is_number(value) and least <= value <= most, float)


POSITIVE = Rule("a number > 0", lambda value: is_number(value) and value > 0, float)


def one_of(*allowed: str) -> Rule:
    """Accept these words."""
    return Rule(f"one of: {', '.join(allowed)}", lambda value: value in allowed)


def or_auto(rule: Rule) -> Rule:
    """Accept "auto", and what ``rule`` accepts."""
    return Rule(f'"{AUTO}" or {rule.words}', lambda value: value == AUTO or rule.accepts(value), rule.kind)


def or_none(rule: Rule) -> Rule:
    """Accept None, and what ``rule`` accepts."""
    return Rule(f"{rule.words}, or none", lambda value: value is None or rule.accepts(value), rule.kind)


def nearest(key: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown key: the known key that is most similar, else all of them."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are: {', '.join(sorted(known))}"
