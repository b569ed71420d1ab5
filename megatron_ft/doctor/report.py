"""What the check of all hosts has found: a row for each thing that is not well, one for each check that is, and the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from megatron_ft.core.pairs import listed
from megatron_ft.doctor.local import BROKEN, COLOURS, OK, WARN


@dataclass(frozen=True)
class Row:
    """``hosts``: whom it is about, none: all together. BROKEN: they must not start; ``either``: not both of them."""

    check: str
    hosts: tuple[int, ...]
    state: str
    details: str
    remedy: str = ""
    either: bool = False


@dataclass
class Report:
    """Rows in the order in which they were found; ``raw``: everything that was measured. ``names``: of all hosts."""

    names: Mapping[int, str]
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def ok(self, check: str, details: str) -> None:
        """On all hosts."""
        self.rows.append(Row(check, (), OK, details))

    def warn(self, check: str, hosts: Collection[int], details: str, remedy: str = "") -> None:
        self._add(Row(check, tuple(hosts), WARN, details, remedy))

    def bad(self, check: str, hosts: Collection[int], details: str, remedy: str = "", either: bool = False) -> None:
        self._add(Row(check, tuple(hosts), BROKEN, details, remedy, either))

    def _add(self, row: Row) -> None:
        """Hosts of which the same is to be said share a row."""
        for number, other in enumerate(self.rows):
            if not row.either and replace(other, hosts=()) == replace(row, hosts=()) and other.hosts and row.hosts:
                self.rows[number] = replace(other, hosts=tuple(sorted({*other.hosts, *row.hosts})))
                return
        self.rows.append(row)

    @property
    def bad_hosts(self) -> dict[int, list[str]]:
        """What each has against it."""
        found: dict[int, list[str]] = {}
        for row in self.rows:
            for host in row.hosts if row.state == BROKEN and not row.either else ():
                found.setdefault(host, []).append(f"{row.check}: {row.details}")
        return dict(sorted(found.items()))

    @property
    def startable(self) -> set[int]:
        """Hosts of which nothing bad is known, and of two that must not both start the first."""
        left = set(self.names) - self.bad_hosts.keys()
        for row in self.rows:
            if row.either and set(row.hosts) <= left:
                left.discard(max(row.hosts))
        return left

    @property
    def ready(self) -> bool:
        return not any(row.state == BROKEN for row in self.rows)

    def verdict(self) -> str:
        """The last line."""
        if self.ready:
            return f"all {len(self.names)} hosts are ready"
        bad = self.bad_hosts
        parts = [f"{self._known(host)} ({_and_more(reasons)})" for host, reasons in bad.items()]
        links: dict[tuple[int, ...], list[str]] = {}
        for row in self.rows:
            if row.either and not set(row.hosts) & bad.keys():
                links.setdefault(row.hosts, []).append(row.details)
        shown = list(links.items())[:5]
        parts += [f"{' or '.join(self.names[host] for host in hosts)} ({_and_more(reasons)})" for hosts, reasons in shown]
        if len(links) > len(shown):
            parts.append(f"{len(links) - len(shown)} more pairs")
        general = [f"{row.check}: {row.details}" for row in self.rows if row.state == BROKEN and not row.hosts]
        if general:
            parts.append(f"all of them together ({_and_more(general)})")
        return f"do not start on: {', '.join(parts)}"

    def table(self) -> Table:
        table = Table(title=f"megatron-ft doctor, {len(self.names)} hosts", title_justify="left")
        for name in ("check", "host", "state", "details", "what to do"):
            table.add_column(name)
        for row in self.rows:
            state = f"[{COLOURS[row.state]}]{row.state}[/]"
            table.add_row(row.check, escape(self._whom(row)), state, escape(row.details), escape(row.remedy))
        return table

    def to_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "hosts": [self.names[host] for host in row.hosts]} for row in self.rows]
        return {"ready": self.ready, "verdict": self.verdict(), "findings": rows, **self.raw}

    def _whom(self, row: Row) -> str:
        if not row.hosts or len(row.hosts) == len(self.names) > 1:
            return "all"
        return listed(self.names[host] for host in row.hosts)

    def _known(self, host: int) -> str:
        return f"{self.names[host]}, host 0 itself" if host == 0 else self.names[host]


def _and_more(reasons: list[str]) -> str:
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]}; and {len(reasons) - 1} more"
