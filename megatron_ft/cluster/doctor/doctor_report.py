"""Findings of the doctor: of one machine (:class:`Finding`) and of all hosts together (:class:`Report`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.text import Text

from megatron_ft.utils.tables import Column, FittedTable

OK, WARN, MISSING, BROKEN = "ok", "warn", "missing", "broken"
OPTIONAL = "optional"
COLOURS = {OK: "green", WARN: "yellow", MISSING: "red", OPTIONAL: "dim", BROKEN: "red"}


@dataclass(frozen=True)
class Finding:
    """One result of the local check. ``needed``: training cannot start without it."""

    what: str
    state: str
    details: str
    remedy: str = ""
    needed: bool = False

    @property
    def shown_state(self) -> str:
        """The state in the table: a thing that is missing and not needed is optional."""
        return OPTIONAL if self.state == MISSING and not self.needed else self.state


@dataclass(frozen=True)
class Row:
    """One result of the check of all hosts.

    Attributes:
        check: name of the check.
        hosts: ranks of the hosts concerned; empty for all hosts together.
        state: ``OK``, ``WARN``, or ``BROKEN`` when these hosts must not start.
        details: what was found.
        remedy: what to do about it.
        either: it suffices to leave out one of the two ``hosts``.
    """

    check: str
    hosts: tuple[int, ...]
    state: str
    details: str
    remedy: str = ""
    either: bool = False


@dataclass
class Report:
    """Rows in the order of the checks. ``names``: host names by rank; ``raw``: all measured values, for ``--json``."""

    names: Mapping[int, str]
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def ok(self, check: str, details: str) -> None:
        """Adds a check that all hosts have passed."""
        self.rows.append(Row(check, (), OK, details))

    def warn(self, check: str, host: int, details: str, remedy: str = "") -> None:
        """Adds a difference that does not prevent a start."""
        self._add(Row(check, (host,), WARN, details, remedy))

    def bad(self, check: str, hosts: Collection[int], details: str, remedy: str = "", either: bool = False) -> None:
        """Adds a reason not to start on ``hosts``."""
        self._add(Row(check, tuple(hosts), BROKEN, details, remedy, either))

    def _add(self, row: Row) -> None:
        """Hosts with the same finding share a row."""
        for number, other in enumerate(self.rows):
            if not row.either and other.hosts and replace(other, hosts=()) == replace(row, hosts=()):
                self.rows[number] = replace(other, hosts=tuple(sorted({*other.hosts, *row.hosts})))
                return
        self.rows.append(row)

    @property
    def ready(self) -> bool:
        return not any(row.state == BROKEN for row in self.rows)

    def verdict(self) -> str:
        """Returns the last line: the hosts and links to leave out, each with its reasons."""
        if self.ready:
            return f"all {len(self.names)} hosts are ready"
        hosts: dict[int, list[str]] = {}
        links: dict[tuple[int, ...], list[str]] = {}
        for row in self.rows:
            if row.state == BROKEN and row.either:
                links.setdefault(row.hosts, []).append(row.details)
            elif row.state == BROKEN:
                for host in row.hosts:
                    hosts.setdefault(host, []).append(f"{row.check}: {row.details}")
        parts = [
            f"{self.names[host]}{', host 0 itself' if host == 0 else ''} ({_first(reasons)})"
            for host, reasons in sorted(hosts.items())
        ]
        pairs = [
            f"{' or '.join(self.names[host] for host in link)} ({_first(reasons)})"
            for link, reasons in links.items()
            if not hosts.keys() & set(link)
        ]
        more = [f"{len(pairs) - 5} more links"] if len(pairs) > 5 else []
        return f"do not start on: {', '.join([*parts, *pairs[:5], *more])}"

    def table(self) -> FittedTable:
        rows = [(row.check, self._hosts(row), row.state, row.details, row.remedy) for row in self.rows]
        return table(
            f"megatron-ft doctor, {len(self.names)} hosts", ("check", "host", "state", "details", "remedy"), rows
        )

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "hosts": [self.names[host] for host in row.hosts]} for row in self.rows]
        return {"ready": self.ready, "verdict": self.verdict(), "findings": rows, **self.raw}

    def _hosts(self, row: Row) -> str:
        every = not row.hosts or len(row.hosts) == len(self.names) > 1
        return "all" if every else listed(self.names[host] for host in row.hosts)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> FittedTable:
    """Returns a table in which the states have colours."""
    cells = [[Text(text, style=COLOURS.get(text, "")) for text in row] for row in rows]
    return FittedTable(title, [Column(name) for name in columns], cells, "nothing was checked")


def _first(reasons: list[str]) -> str:
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]}; and {len(reasons) - 1} more"


def listed(names: Iterable[str], most: int = 4) -> str:
    """Returns the names as a list in words, of more than ``most`` + 1 names the first and the number of the others."""
    every = list(names)
    shown = every if len(every) <= most + 1 else [*every[:most], f"{len(every) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def rate(bytes_s: float) -> str:
    """Returns a rate with its unit; 1 MB is 10^6 bytes."""
    return f"{bytes_s / 1e6:.3g} MB/s" if bytes_s < 999.5e6 else f"{bytes_s / 1e6:.0f} MB/s"
