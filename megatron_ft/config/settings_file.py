"""The files in which a user gives settings: JSON, or YAML where PyYAML is installed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ft.errors import ConfigError

_YAML = (".yaml", ".yml")


def read(path: Path, what: str) -> dict[str, Any]:
    """Return the names and values of a file; one that ends in .yaml or .yml is read as YAML. ``what`` names it in messages.

    Raises ``ConfigError`` for a file that cannot be read, is not an object, or gives a name twice; ``ModuleNotFoundError``
    without PyYAML (``utils.extras``).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist; give the path of a JSON or YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from None
    try:
        found = _yaml(text) if path.suffix.lower() in _YAML else json.loads(text, object_pairs_hook=_once)
    except ConfigError as error:
        raise ConfigError(f"{what} {path}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} {path}: it is not JSON: {error}; a YAML file ends in {' or '.join(_YAML)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{what} {path}: it holds a {type(found).__name__}; it must be an object of names and values")
    return found


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the object of these keys and values. A parser would silently keep the last one of a key that is given twice."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{key!r} is given twice; remove one")
        found[key] = value
    return found


def _yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _once((self.construct_object(key, deep=True), None) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # a SafeLoader: no objects
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key is an object
        raise ConfigError(f"it is not YAML: {' '.join(str(error).split())}") from None
