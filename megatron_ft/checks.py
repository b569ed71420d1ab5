"""Rules for single settings: each refuses a value with its name, the rule and the remedy. For ``config``."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from megatron_ft.errors import ConfigError

AUTO = "auto"


def auto_or_count(name: str, value: Any) -> int | str:
    if value != AUTO and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f'{name} is {value!r}; it must be "{AUTO}" or a whole number >= 1')
    return value


def auto_or_positive(name: str, value: Any) -> float | str:
    if value != AUTO and (not is_number(value) or value <= 0):
        raise ConfigError(f'{name} is {value!r}; it must be "{AUTO}" or a number > 0')
    return value if value == AUTO else float(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number >= {least}")


def positive(name: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise ConfigError(f"{name} is {value!r}; it must be a number > 0")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; this version knows: {', '.join(allowed)}")


def nearest(key: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are: {', '.join(sorted(known))}"


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ConfigError(f"setting {key!r} is given twice; JSON would silently keep the last one, remove one")
        seen[key] = value
    return seen
