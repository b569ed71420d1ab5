"""Build a :class:`Cluster` from flags, files and presets. Every mistake in them raises ``ConfigError``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron_ft.config import settings_file
from megatron_ft.config.validators import POSITIVE, nearest
from megatron_ft.errors import ConfigError
from megatron_ft.plan import closed_forms
from megatron_ft.plan.cluster import OPTIONAL, Cluster
from megatron_ft.plan.presets import PRESETS

RATES = ("node_mtbf_hours", "failures_per_1000_node_days", "system_mtbf_s")
NAMES = (*(field.name for field in fields(Cluster) if field.name != "mtbf_s"), *RATES)
"""Keys of a file. Flags have the same names, with dashes."""
NONE = "none"
"""The text of a flag for a value that does not exist; in a file it is null."""


def cluster(
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    measured: Mapping[str, Any] | None = None,
) -> Cluster:
    """Return the cluster that these inputs describe. Each of them overrides those before it.

    Args:
        preset: Name of a preset.
        file: YAML or JSON file.
        flags: Values of the command line's flags; None for a flag that is not given. They override ``measured``.
        measured: Values from the record of a run. They override ``file``.
    """
    inputs: dict[str, Any] = {}
    given = {
        name: None if value == NONE and name in OPTIONAL else value
        for name, value in flags.items()
        if value is not None
    }
    for layer in (_preset(preset), read(file) if file else {}, measured or {}, given):
        rates = [name for name in RATES if name in layer]
        if len(rates) > 1:
            raise ConfigError(f"{' and '.join(rates)} are both given, but define the same quantity; give one of them")
        if rates:
            inputs = {name: value for name, value in inputs.items() if name not in RATES}
        inputs = {**inputs, **layer}
    return build(inputs)


def as_number(text: str) -> int | float | str:
    """Return the number that a flag's text says. Another text stays: the rule of the value refuses it, as it does one in a
    file."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def build(inputs: Mapping[str, Any]) -> Cluster:
    """Return the cluster with these values, with the failure rate in one of the three units of ``RATES``."""
    needed = [f.name for f in fields(Cluster) if f.default is MISSING and f.name != "mtbf_s"]
    missing = [_flag(name) for name in needed if name not in inputs]
    if not any(name in inputs for name in RATES):
        missing.append(f"the failure rate ({', '.join(map(_flag, RATES[:-1]))} or {_flag(RATES[-1])})")
    if missing:
        raise ConfigError(
            f"missing: {', '.join(missing)}; give them as flags or in a --file, or begin with a --preset "
            f"({', '.join(PRESETS)})"
        )
    values = {name: value for name, value in inputs.items() if name not in RATES}
    # The other values are checked with a valid mtbf_s, so that a mistake in the rate is reported by the rate's own name.
    sizes = Cluster(**values, mtbf_s=float("1e18"))
    return Cluster(**values, mtbf_s=_system_mtbf_s(inputs, sizes))


def read(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file with the keys ``NAMES``."""
    raw = settings_file.read(path, "file")
    for name, value in raw.items():
        if name not in NAMES:
            raise ConfigError(f"file {path}: {name!r} is not known{nearest(str(name), NAMES)}")
        if value is None and name not in OPTIONAL:
            raise ConfigError(f"file {path}: {name} has no value; give it a number or remove it")
    return raw


def _preset(name: str | None) -> Mapping[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not known; there are: {', '.join(PRESETS)}")
    return PRESETS[name].inputs


def _system_mtbf_s(inputs: Mapping[str, Any], sizes: Cluster) -> float:
    name = next(name for name in RATES if name in inputs)
    value = POSITIVE(name, inputs[name])
    if name == "system_mtbf_s":
        return value
    if name == "node_mtbf_hours":
        return closed_forms.system_mtbf_s(value * closed_forms.HOUR_S, sizes.nodes)
    return closed_forms.system_mtbf_s(closed_forms.node_mtbf_from_rate_s(value), sizes.nodes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
