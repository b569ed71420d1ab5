"""Every setting of a run, read from ``config/schema.py``: ``python -m tools.settings`` writes docs/settings.md anew.

A setting is told once: its meaning is the docstring below its field, the values are the words of its rule (or the rule's
docstring), and the default is the field's. tests/unit/test_settings.py fails when the page says something else.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_ft.config import schema
from megatron_ft.config.validators import Rule

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- written by `python -m tools.settings` -->", "<!-- end -->"


def meanings(section: type) -> dict[str, str]:
    """Return the docstring below each field of a section, in one line."""
    tree = ast.parse(inspect.getsource(section))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def tables() -> str:
    section = schema.FaultToleranceConfig()
    nested = [f for f in fields(section) if is_dataclass(getattr(section, f.name))]
    lines = _table("", section, [f for f in fields(section) if f not in nested])
    for field in nested:
        inner = getattr(section, field.name)
        lines += ["", f"## `{field.name}`", _markdown(inspect.cleandoc(type(inner).__doc__ or "")), ""]
        lines += _table(f"{field.name}.", inner, list(fields(inner)))
    return "\n".join(lines)


def _table(prefix: str, section: Any, settings: list[Field[Any]]) -> list[str]:
    said = meanings(type(section))
    rows = [
        f"| `{prefix}{f.name}` | {_default(getattr(section, f.name))} | {_values(f.metadata['rule'])} "
        f"| {_markdown(said[f.name])} |"
        for f in settings
    ]
    return ["| key | default | values | meaning |", "|---|---|---|---|", *rows]


def _default(value: Any) -> str:
    return f"`{value:g}`" if type(value) is float else f"`{json.dumps(value)}`"


def _values(rule: Any) -> str:
    """Return the words of a rule; those of a choice in quotes, as JSON wants them."""
    if not isinstance(rule, Rule):
        return _markdown(" ".join(inspect.cleandoc(rule.__doc__).split()).removeprefix("Accept ").removesuffix("."))
    kind, choice, words = rule.words.rpartition("one of: ")
    return _markdown(kind + ", ".join(f'"{word}"' for word in words.split(", ")) if choice else words)


def _markdown(text: str) -> str:
    """Return the text of a docstring: pages become links, code and quoted values code."""
    text = re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", lambda m: f"[{m[1]}]({m[1]}{m[2] or ''})", text.replace("``", "`"))
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r'"[^"]*"', r"`\g<0>`", part) for part in parts)


def page() -> str:
    """Return the page as it ought to be."""
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{head}{BEGIN}\n\n{tables()}\n\n{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
