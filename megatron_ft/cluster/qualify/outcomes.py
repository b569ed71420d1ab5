"""The checks of a qualification, their outcomes, and the document and table that show them.

Every check is listed in :data:`CHECKS`, whatever becomes of it, so two documents of one ``SCHEMA`` compare row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from megatron_ft.utils.tables import Column, FittedTable

PROVEN, FAILED, NOT_HERE = "proven", "failed", "not possible here"
_COLOURS = {PROVEN: "green", FAILED: "red", NOT_HERE: "yellow"}
SCHEMA = 1
"""Version of the JSON document: it grows when a name in it changes its meaning or goes; new names do not count."""

_ENVIRONMENT = {
    "torch": "torch on all hosts",
    "gpus": "GPUs",
    "nccl": "NCCL",
    "watchdog": "settings of NCCL's watchdog",
    "communicator": "communicator between the groups",
}
_COMMUNICATOR = {
    "init": "all groups connect",
    "all_reduce": "all-reduce: sums and bandwidth",
    "messages": "broadcast and messages",
    "state": "state transfer",
    "overlap": "step with overlapped reduction",
    "abort": "abort of a pending all-reduce",
    "stopped": "a member is stopped (SIGSTOP) meanwhile",
    "killed": "a member is killed (SIGKILL) meanwhile",
    "survivors": "the survivors connect again",
    "newcomer": "a new process takes the place",
}
_TRAINING = {
    "alone": "training without failures",
    "faults": "groups killed and stopped, every microbatch once",
    "rejoin": "lost groups come back",
    "losses": "losses equal those without failures",
    "memory": "memory of the layer",
}
KINDS = ("gloo", "nccl")
"""Communicators that are checked, in this order."""
CHECKS: dict[str, str] = {
    **{f"environment.{name}": text for name, text in _ENVIRONMENT.items()},
    **{f"{kind}.{name}": text for kind in KINDS for name, text in _COMMUNICATOR.items()},
    **{f"training.{name}": text for name, text in _TRAINING.items()},
}
"""Name -> what it is about, in the order of the table."""


class CheckFailed(Exception):
    """The check has found something wrong; the message says what."""


class NotHere(Exception):
    """The check cannot be made on these machines; the message says why."""


@dataclass(frozen=True)
class Measured:
    """A number. ``what``: its name, unique in its check."""

    what: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.what} {self.value:.3g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        name: a key of :data:`CHECKS`.
        outcome: ``PROVEN``, ``FAILED`` or ``NOT_HERE``.
        reason: what was seen; never empty.
        measured: the numbers.
    """

    name: str
    outcome: str
    reason: str
    measured: Sequence[Measured] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "what": CHECKS[self.name], "measured": [asdict(one) for one in self.measured]}


Found = tuple[str, Sequence[Measured]]
"""Of a check that has proven its point: what was seen, and the numbers."""


@dataclass
class Qualification:
    """All that was found. ``said``: called with each check as soon as it is made."""

    said: Callable[[Check], None] = lambda check: None
    checks: dict[str, Check] = field(default_factory=dict)

    def make(self, name: str, check: Callable[[], Found]) -> bool:
        """Make one check. Return whether it is proven."""
        try:
            reason, measured = check()
            made = Check(name, PROVEN, reason, measured)
        except NotHere as why:
            made = Check(name, NOT_HERE, str(why))
        except CheckFailed as why:
            made = Check(name, FAILED, str(why))
        self.record(made)
        return made.outcome == PROVEN

    def record(self, made: Check) -> None:
        """Note a check that was made."""
        self.checks[made.name] = made
        self.said(made)

    def skip(self, part: str, why: str) -> None:
        """Say of all checks of a part (``gloo``, ``training``, ...) that are not made yet why they cannot be made."""
        for name in CHECKS:
            if name.startswith(f"{part}.") and name not in self.checks:
                self.record(Check(name, NOT_HERE, why))

    def in_order(self) -> list[Check]:
        """Return all checks in the order of :data:`CHECKS`."""
        return [self.checks[name] for name in CHECKS if name in self.checks]

    @property
    def exit_code(self) -> int:
        """0 when nothing failed, else 1."""
        return int(any(check.outcome == FAILED for check in self.checks.values()))

    def verdict(self) -> str:
        """Return the last line."""
        made = self.in_order()
        counts = [f"{sum(check.outcome == one for check in made)} {one}" for one in (PROVEN, FAILED, NOT_HERE)]
        failed = [check.name for check in made if check.outcome == FAILED]
        return f"{len(made)} checks: {', '.join(counts)}" + (f"; failed: {', '.join(failed)}" if failed else "")

    def table(self, title: str) -> FittedTable:
        """Return the table for people: checks of a part that cannot be made for the same reason share a row."""
        rows: list[tuple[Check, str, str]] = []
        for check in self.in_order():
            part, _, name = check.name.partition(".")
            last, names, _ = rows[-1] if rows else (check, "", "")
            same = (last.outcome, last.reason, last.name.partition(".")[0]) == (NOT_HERE, check.reason, part)
            if rows and same and check.outcome == NOT_HERE:
                rows[-1] = (last, f"{names}, {name}", "")
            else:
                rows.append((check, check.name, CHECKS[check.name]))
        cells = [
            (
                names,
                what,
                Text(check.outcome, style=_COLOURS[check.outcome]),
                check.reason,
                ", ".join(map(str, check.measured)),
            )
            for check, names, what in rows
        ]
        columns = [
            Column("check"),
            Column("what", last=1),
            Column("outcome", least=len(NOT_HERE)),
            Column("seen, or reason"),
            Column("measured"),
        ]
        return FittedTable(title, columns, cells, "nothing was checked")

    def to_json(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document. ``about``: versions, machine and command."""
        made = self.in_order()
        return {
            "schema": SCHEMA,
            **about,
            "verdict": self.verdict(),
            "failed": [check.name for check in made if check.outcome == FAILED],
            "checks": [check.to_json() for check in made],
        }
