"""The shared words (docs/architecture.md, *Words*) as plain, frozen values. No behaviour beyond conversion to JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GroupId = int
Bucket = int


class Microbatch(NamedTuple):
    """The unit of work. Which samples it holds is a pure function of these three numbers (``data.order``)."""

    step: int
    shard: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}/{self.shard}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Microbatch:
        """Inverse of ``str``. Raises ``ValueError``."""
        step, rest = text.split("/")
        shard, index = rest.split(".")
        return cls(int(step), int(shard), int(index))


Assignment = Mapping[GroupId, tuple[Microbatch, ...]]
"""Who computes *and contributes* which microbatches of one step."""


@dataclass(frozen=True)
class Plan:
    """The assignment of one step, with the reason it looks like this.

    ``patched`` are the microbatches that changed hands after the step began, because the group that had them was lost.
    """

    step: int
    assignment: Assignment
    reason: str
    patched: frozenset[Microbatch] = frozenset()

    def of(self, group: GroupId) -> tuple[Microbatch, ...]:
        return self.assignment.get(group, ())


@dataclass(frozen=True)
class Report:
    """What a survivor publishes when an epoch ends. After it, nothing of that epoch may finish at this group any more.

    ``step`` is the step the group is working on, so ``step - 1`` is committed there. ``have`` are the buckets of
    ``step`` whose reduction the host saw complete before the abort; with ``complete`` those are all, and the group can
    commit ``step`` without anybody's help. ``synced`` is False until it has received the model state it starts from.
    """

    epoch: int
    group: GroupId
    step: int
    have: tuple[Bucket, ...] = ()
    synced: bool = True
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "group": self.group,
            "step": self.step,
            "have": list(self.have),
            "synced": self.synced,
            "complete": self.complete,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Report:
        return cls(raw["epoch"], raw["group"], raw["step"], tuple(raw["have"]), raw["synced"], raw["complete"])


@dataclass(frozen=True)
class Begun:
    """How a step's plan came about: the membership it was made for, and (lost, joined) of every view since.

    A group that joins in the middle of a step has no share of it, but takes over its part when another is lost.
    """

    live: tuple[GroupId, ...]
    changes: tuple[tuple[tuple[GroupId, ...], tuple[GroupId, ...]], ...] = ()

    def after(self, lost: Collection[GroupId], joined: Collection[GroupId]) -> Begun:
        change = (tuple(sorted(lost)), tuple(sorted(joined)))
        return Begun(self.live, (*self.changes, change)) if any(change) else self

    def to_json(self) -> list[Any]:
        return [list(self.live), [[list(lost), list(joined)] for lost, joined in self.changes]]

    @classmethod
    def from_json(cls, raw: list[Any]) -> Begun:
        return cls(_groups(raw[0]), tuple((tuple(lost), tuple(joined)) for lost, joined in raw[1]))


@dataclass(frozen=True)
class View:
    """Numbered membership, and everything the survivors need to go on from it (architecture.md, step protocol 3-4).

    ``step`` is the step that goes on, ``begun`` the origin of its plan. ``behind`` take the committed state from
    ``source`` first; ``joined`` enter with this view, and get that state by themselves. ``final`` names, for every bucket of
    ``step`` that some survivor holds finished, the group the others fetch it from; ``missing`` says who lacks it.
    ``incarnations`` are the starts of the groups that were started more than once. ``reports`` are those of the epoch
    before that all this was decided from.
    """

    epoch: int
    live: tuple[GroupId, ...]
    reason: str
    step: int = 0
    lost: Mapping[GroupId, str] = field(default_factory=dict)
    joined: tuple[GroupId, ...] = ()
    source: GroupId | None = None
    behind: tuple[GroupId, ...] = ()
    final: Mapping[Bucket, GroupId] = field(default_factory=dict)
    missing: Mapping[Bucket, tuple[GroupId, ...]] = field(default_factory=dict)
    begun: Begun = Begun(())
    incarnations: Mapping[GroupId, int] = field(default_factory=dict)
    reports: tuple[Report, ...] = ()

    def seats(self, group: GroupId, incarnation: int) -> bool:
        """Whether that start of the group is a member."""
        return group in self.live and self.incarnations.get(group, 0) == incarnation

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "live": list(self.live),
            "reason": self.reason,
            "step": self.step,
            "lost": {str(group): reason for group, reason in self.lost.items()},
            "joined": list(self.joined),
            "source": self.source,
            "behind": list(self.behind),
            "final": {str(bucket): owner for bucket, owner in self.final.items()},
            "missing": {str(bucket): list(groups) for bucket, groups in self.missing.items()},
            "begun": self.begun.to_json(),
            "incarnations": {str(group): number for group, number in self.incarnations.items()},
            "reports": _fold(self.reports),
        }

    def to_wire(self) -> dict[str, Any]:
        """The same in short, for the control store: every group reads it, and there may be thousands in it."""
        raw = self.to_json()
        began, changes = raw["begun"]
        told = [[*said, _spans(groups)] for *said, groups in raw["reports"]]
        missing = {bucket: _spans(groups) for bucket, groups in raw["missing"].items()}
        some = {"live": _spans(raw["live"]), "behind": _spans(raw["behind"]), "begun": [_spans(began), changes]}
        return {**raw, **some, "missing": missing, "reports": told}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> View:
        """Of either form."""
        return cls(
            epoch=raw["epoch"],
            live=_groups(raw["live"]),
            reason=raw["reason"],
            step=raw["step"],
            lost={int(group): reason for group, reason in raw["lost"].items()},
            joined=tuple(raw["joined"]),
            source=raw["source"],
            behind=_groups(raw["behind"]),
            final={int(bucket): owner for bucket, owner in raw["final"].items()},
            missing={int(bucket): _groups(groups) for bucket, groups in raw["missing"].items()},
            begun=Begun.from_json(raw["begun"]),
            incarnations={int(group): number for group, number in raw["incarnations"].items()},
            reports=_unfold(raw["epoch"] - 1, raw["reports"]),
        )


def _spans(groups: list[GroupId]) -> str:
    """Ascending numbers as ``0-6 8 10-2047``."""
    spans: list[list[GroupId]] = []
    for group in groups:
        if spans and group == spans[-1][1] + 1:
            spans[-1][1] = group
        else:
            spans.append([group, group])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _groups(raw: str | list[GroupId]) -> tuple[GroupId, ...]:
    """Inverse of :func:`_spans`; of a list, its members."""
    if not isinstance(raw, str):
        return tuple(raw)
    spans = (span.partition("-") for span in raw.split())
    return tuple(group for first, _, last in spans for group in range(int(first), int(last or first) + 1))


def _fold(reports: tuple[Report, ...]) -> list[list[Any]]:
    """Reports as ``[step, have, synced, complete, groups]``: thousands of groups say one of a few things."""
    alike: dict[tuple, list[GroupId]] = {}
    for report in reports:
        alike.setdefault((report.step, report.have, report.synced, report.complete), []).append(report.group)
    return [[step, list(have), synced, complete, groups] for (step, have, synced, complete), groups in alike.items()]


def _unfold(epoch: int, raw: list[list[Any]]) -> tuple[Report, ...]:
    found = [
        Report(epoch, group, step, tuple(have), synced, complete)
        for step, have, synced, complete, groups in raw
        for group in _groups(groups)
    ]
    return tuple(sorted(found, key=lambda report: report.group))


@dataclass(frozen=True)
class Exit:
    """A process that ended, as the agent that waited for it saw it.

    ``microbatch`` is the one it was computing, where that is known, as ``str`` writes it.
    """

    group: GroupId
    position: int
    pid: int
    host: str
    signal: str | None
    code: int | None
    detail: str = ""
    microbatch: str | None = None

    def __str__(self) -> str:
        how = self.signal if self.signal else f"exit code {self.code}"
        where = f" in microbatch {self.microbatch}" if self.microbatch else ""
        cause = f" ({self.detail})" if self.detail else ""
        return f"rank {self.position} on {self.host} (pid {self.pid}) ended with {how}{where}{cause}"
