"""docs/settings.md says what ``config/schema.py`` says of each setting."""

import re
from dataclasses import fields, is_dataclass

from megatron_ft.config import schema
from tools import settings


def test_the_page_is_the_one_of_the_schema():
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run `python -m tools.settings`"


def test_the_page_has_every_setting_once():
    rows = re.findall(r"^\| `([\w.]+)` \|", settings.page(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(keys(schema.FaultToleranceConfig()))


def test_every_setting_has_a_meaning_and_values():
    for row in (line for line in settings.tables().splitlines() if line.startswith("| `")):
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def keys(section, prefix=""):
    """Yield the full name of each setting of a section."""
    for field in fields(section):
        value = getattr(section, field.name)
        name = f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from keys(value, f"{name}.")
        else:
            yield name
