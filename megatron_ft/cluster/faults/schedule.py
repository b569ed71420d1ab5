"""Schedules of faults: reading, checking, and writing. The injector carries them out.

    {"seed": 7, "faults": [
      {"kind": "kill", "group": 2, "step": 4, "point": "reduce", "bucket": 1},
      {"kind": "stop", "group": 1, "after_s": 20, "duration_s": 5}]}

YAML is accepted where ``pyyaml`` is installed. A schedule that cannot be carried out exactly is refused before any
process is signalled. docs/fault-injection.md explains every field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from signal import Signals
from typing import Any

from megatron_ft.config import settings_file
from megatron_ft.config.validators import POSITIVE, Rule, is_number, number, one_of, whole_number
from megatron_ft.errors import ConfigError
from megatron_ft.run.injection_points import CORRUPTIBLE, CORRUPTIBLE_BY, POINTS, STATE, describe

IN_PROCESS = ("exception", "oom", "gil", "slow", "nan", "bitflip")
"""Faults that the rank itself must carry out, on an order in its mailbox."""
RAISING = ("exception", "oom")
"""Those of them that end the rank by an exception in its training thread."""
SIGNALS = {"kill": Signals.SIGKILL, "stop": Signals.SIGSTOP, "terminate": Signals.SIGTERM}

_AT_POINT = {"point", "bucket"}
_RANK = {"group", "position"}
_ALLOWED: dict[str, set[str]] = {
    "kill": _RANK | _AT_POINT,
    "stop": _RANK | _AT_POINT | {"duration_s"},
    "terminate": _RANK | _AT_POINT,
    "exception": _RANK | _AT_POINT,
    "oom": _RANK | _AT_POINT,
    "gil": _RANK | _AT_POINT | {"duration_s"},
    "slow": _RANK | {"factor", "steps"},
    "nan": _RANK | {"what", "bucket"},
    "bitflip": _RANK | {"what", "bucket", "bit", "probability"},
    "cut": {"group", "netns", "peer", "direction", "share", "duration_s"},
    "disk_full": {"directory", "duration_s", "limit_mb"},
    "rack": {"groups", "how", "duration_s"} | _AT_POINT,
    "store": {"how", "duration_s"},
    "agent": {"how", "duration_s"},
}
KINDS = tuple(_ALLOWED)
_NEEDED: dict[str, tuple[str, ...]] = {
    "gil": ("group", "duration_s"),
    "slow": ("group", "factor"),
    "cut": ("group", "netns", "peer"),
    "disk_full": ("directory", "duration_s"),
    "rack": ("groups",),
    "store": (),
    "agent": (),
}
_WHEN = ("after_s", "wait_s", "step")
_NUMBER = whole_number(0)
_SHARE = Rule("a number > 0, at most 1", lambda value: is_number(value) and 0 < value <= 1)
_RULES = {
    "group": _NUMBER,
    "groups": Rule(
        "a list of different group numbers",
        lambda value: (
            isinstance(value, tuple) and all(map(_NUMBER.accepts, value)) and len(set(value)) == len(value) > 0
        ),
    ),
    "position": Rule(
        'the number of a rank in its group, or "all"', lambda value: value == "all" or _NUMBER.accepts(value)
    ),
    "after_s": number(0),
    "wait_s": number(0),
    "step": _NUMBER,
    "point": one_of(*POINTS),
    "bucket": _NUMBER,
    "how": one_of(*SIGNALS),
    "duration_s": POSITIVE,
    "factor": Rule("a number > 1", lambda value: is_number(value) and value > 1),
    "steps": whole_number(1),
    "what": one_of(*CORRUPTIBLE),
    "bit": whole_number(0, 63),
    "direction": one_of("both", "in", "out"),
    "share": _SHARE,
    "limit_mb": POSITIVE,
    "probability": _SHARE,
}
_TEXT = Rule("a text", lambda value: isinstance(value, str) and value != "")
"""The rule for all other fields."""
_BUCKET_POINTS = ("reduce", "bucket")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; None for fields that are not given. Raises ``ConfigError`` for an invalid combination.

    docs/fault-injection.md explains the fields. Its time is ``after_s`` seconds after the start of the run, ``wait_s``
    seconds after the preceding fault of the schedule, or ``step``, optionally with ``point`` and ``bucket``.
    """

    kind: str
    group: int | None = None
    groups: tuple[int, ...] | None = None
    position: int | str | None = None
    after_s: float | None = None
    wait_s: float | None = None
    step: int | None = None
    point: str | None = None
    bucket: int | None = None
    how: str | None = None
    duration_s: float | None = None
    factor: float | None = None
    steps: int | None = None
    what: str | None = None
    bit: int | None = None
    netns: str | None = None
    peer: str | None = None
    direction: str | None = None
    share: float | None = None
    directory: str | None = None
    limit_mb: float | None = None
    probability: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}, which is unknown; choose from {', '.join(KINDS)}")
        given = {name for name in _FIELDS if getattr(self, name) is not None}
        _check_names(self.kind, given)
        for name in given:
            _RULES.get(name, _TEXT)(name, getattr(self, name))
        self._check_together()

    def _check_together(self) -> None:
        if self.kind in IN_PROCESS and self.position == "all":
            raise ConfigError(f"position is 'all', and {self.kind} happens in one rank; give its number")
        if self.bucket is not None and "point" in _ALLOWED[self.kind] and self.point not in _BUCKET_POINTS:
            raise ConfigError(
                f"bucket is {self.bucket}, and only the points {' and '.join(_BUCKET_POINTS)} have buckets; leave it out"
            )
        if self.what is not None and self.what not in CORRUPTIBLE_BY[self.kind]:
            known = ", ".join(CORRUPTIBLE_BY[self.kind])
            raise ConfigError(f"what is {self.what!r}, which {self.kind} cannot change; choose from {known}")
        if self.bucket is not None and self.what in (*STATE, "activation"):
            raise ConfigError(
                f"bucket is {self.bucket} and what is {self.what!r}, which has no buckets; leave bucket out"
            )
        if self.probability is not None and self.what not in ("gradient", None):
            raise ConfigError(
                f"probability is {self.probability:g} and what is {self.what!r}; it is for flips in the gradient of each "
                f"microbatch"
            )
        if self.duration_s is not None and (self.how or "stop") != "stop":
            raise ConfigError(
                f"duration_s is {self.duration_s:g} and how is {self.how}, which does not end; leave duration_s out"
            )
        if self.duration_s is not None and self.how is None and self.kind in ("rack", "store", "agent"):
            raise ConfigError(f'duration_s is {self.duration_s:g}, but {self.kind} kills by default; add "how": "stop"')

    # --- meaning ------------------------------------------------------------------------------------------------------

    @property
    def signal(self) -> Signals | None:
        """The signal for the processes; None for a kind without one."""
        if self.kind in SIGNALS:
            return SIGNALS[self.kind]
        return SIGNALS[self.how or "kill"] if self.kind in ("rack", "store", "agent") else None

    @property
    def is_order(self) -> bool:
        """True when a rank needs an order: to carry the fault out, or to freeze at its point."""
        return self.kind in IN_PROCESS or self.point is not None

    @property
    def order_point(self) -> str:
        """The point at which a rank carries the order out."""
        return self.point or ("backward" if self.kind in (*RAISING, "gil") else "begin")

    def targets(self, ranks_per_group: int) -> tuple[tuple[int, int], ...]:
        """Returns (group, position) of the ranks concerned."""
        everybody = self.groups is not None or self.position == "all"
        positions = range(ranks_per_group) if everybody else (int(self.position or 0),)
        groups = self.groups if self.groups is not None else () if self.group is None else (self.group,)
        return tuple((group, position) for group in groups for position in positions)

    def takes(self, groups: int) -> frozenset[int]:
        """Returns the groups that are lost. Stopped groups count, too: the others may continue without them."""
        if self.kind == "agent":  # the ranks end with their agent
            return frozenset() if self.signal is Signals.SIGSTOP else frozenset(range(groups))
        if self.signal is not None or self.kind in RAISING:  # no group for a fault of the store
            return frozenset(group for group, _ in self.targets(1))
        return frozenset()

    def when(self) -> str:
        """Describes the time of the fault."""
        if self.step is not None:
            time = f"step {self.step}"
            if not self.is_order:
                return f"{time} is committed"
        else:
            time = f"{self.after_s:g} s" if self.after_s is not None else f"{self.wait_s:g} s after the last"
        if self.kind in ("slow", "nan", "bitflip") or not self.is_order:
            return time
        bucket = self.bucket if self.point is not None else None
        return f"{time}, {describe(self.order_point, bucket)}"

    def whom(self) -> str:
        """Describes the target of the fault."""
        if self.kind in ("agent", "store"):
            return self.kind
        if self.groups is not None:
            return f"groups {' '.join(map(str, self.groups))}"
        if self.directory is not None:
            return self.directory
        if self.kind == "cut":
            return f"group {self.group}, {self.netns} - {self.peer}"
        if self.position == "all":
            return f"group {self.group}, all ranks"
        return f"group {self.group}" + (f", rank {self.position}" if self.position else "")

    # --- as data ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, value: Any) -> Fault:
        """Raises ``ConfigError``."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"{value!r} is not a fault; write an object with a kind")
        if "kind" not in value:
            raise ConfigError(f"kind is missing; choose from {', '.join(KINDS)}")
        unknown = sorted(str(name) for name in value if name != "kind" and name not in _FIELDS)
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not known; the fields are {', '.join(_FIELDS)}")
        groups = value.get("groups")
        return cls(**{**value, "groups": tuple(groups) if isinstance(groups, list) else groups})

    def to_json(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self).items() if value is not None}
        return found if self.groups is None else {**found, "groups": list(self.groups)}


_FIELDS = tuple(field.name for field in fields(Fault) if field.name != "kind")


@dataclass(frozen=True)
class Schedule:
    """Faults in their order; ``seed`` decides what they leave open, such as the bit to flip."""

    faults: tuple[Fault, ...]
    seed: int = 0

    @classmethod
    def from_json(cls, value: Any) -> Schedule:
        """Raises ``ConfigError`` with the number of the invalid fault, from 1."""
        if not isinstance(value, Mapping) or not isinstance(value.get("faults"), list):
            raise ConfigError('a schedule is an object with a list of faults: {"faults": [...]}')
        unknown = sorted(str(name) for name in value if name not in ("faults", "seed"))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not known; a schedule has faults and seed")
        seed = value.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ConfigError(f"seed is {seed!r} and must be a whole number")
        faults = []
        for count, fault in enumerate(value["faults"], 1):
            try:
                faults.append(Fault.from_json(fault))
            except ConfigError as error:
                raise ConfigError(f"fault {count}: {error}") from None
        return cls(tuple(faults), seed)

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "faults": [fault.to_json() for fault in self.faults]}

    def check(self, groups: int, ranks_per_group: int) -> None:
        """Raises ``ConfigError`` when a run of that size lacks the group or rank of a fault."""
        for count, fault in enumerate(self.faults, 1):
            for group, position in fault.targets(ranks_per_group):
                if group >= groups:
                    raise ConfigError(f"fault {count} is for group {group}; the run has groups 0 to {groups - 1}")
                if position >= ranks_per_group:
                    raise ConfigError(
                        f"fault {count} is for rank {position}; groups have ranks 0 to {ranks_per_group - 1}"
                    )

    def key(self, index: int) -> str:
        """Returns the name of a fault in the run record; the same schedule always has the same names."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return f"{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}/{index + 1}"

    def seed_of(self, index: int) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def load(path: Path) -> Schedule:
    """Reads a schedule. Raises ``ConfigError``."""
    found = settings_file.read(path, "schedule")
    try:
        return Schedule.from_json(found)
    except ConfigError as error:
        raise ConfigError(f"schedule {path}: {error}") from None


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_names(kind: str, given: set[str]) -> None:
    for name in _NEEDED.get(kind, ("group",)):
        if name not in given:
            raise ConfigError(f"{kind} needs {name}")
    when = [name for name in _WHEN if name in given]
    if len(when) != 1:
        said = " and ".join(when) or "no time"
        raise ConfigError(f"{kind} has {said} and must have one of {', '.join(_WHEN)}")
    wrong = sorted(given - _ALLOWED[kind] - set(_WHEN))
    if wrong:
        allowed = ", ".join(name for name in _FIELDS if name in _ALLOWED[kind])
        raise ConfigError(f"{kind} has no field {wrong[0]}; besides its time it has {allowed}")
