"""The types that all packages share (docs/architecture.md, *Words*): frozen values, with conversion to JSON and text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

from megatron_ft import codec

GroupId = int
Bucket = int


Value = TypeVar("Value")


def given(value: Value | None) -> Value:
    """Return ``value``, which is not None here; for fields that are set after their object is made."""
    assert value is not None
    return value


class Microbatch(NamedTuple):
    """The unit of work. Its samples are a pure function of these three numbers (``data.order``).

    Attributes:
        step: number of the step, from 0.
        shard: number of the shard, 0 to N - 1.
        index: number within the shard, 0 to G - 1.
    """

    step: int
    shard: int
    index: int  # type: ignore[assignment]  # in place of tuple.index, which is not used

    def __str__(self) -> str:
        return f"{self.step}/{self.shard}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Microbatch:
        """Return the microbatch that ``text`` names (inverse of ``str``). Raises ``ValueError``."""
        step, rest = text.split("/")
        shard, index = rest.split(".")
        return cls(int(step), int(shard), int(index))


Assignment = Mapping[GroupId, tuple[Microbatch, ...]]
"""Group -> the microbatches of one step that it computes *and contributes*."""
Part = tuple[Microbatch, ...]
"""Standby work: microbatches that another group contributes. They are promoted together or not at all."""


@dataclass(frozen=True)
class Plan:
    """The assignment of one step.

    Attributes:
        step: the step.
        assignment: the microbatches of each group.
        reason: why the assignment looks like this, for people.
        patched: microbatches that some group has to compute anew, because the group that had them was lost in the step.
        standby: group -> the parts that it computes and keeps apart from its own gradient. Numbered from 1 in this
            order, the same during the whole step. Parts of two groups are equal or have no microbatch in common.
        facts: figures of the policy about this plan, for the run record.
        wipe_out: the reason why no plan is possible, so that the run has to go back to its checkpoint; else empty.
    """

    step: int
    assignment: Assignment
    reason: str
    patched: frozenset[Microbatch] = frozenset()
    standby: Mapping[GroupId, tuple[Part, ...]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    wipe_out: str = ""

    def of(self, group: GroupId) -> tuple[Microbatch, ...]:
        return self.assignment.get(group, ())

    def without_standby_of(self, lost: Collection[GroupId]) -> Plan:
        """Return the plan without the standby work of lost groups; a new start of one has none in this step."""
        if not self.standby.keys() & set(lost):
            return self
        return replace(self, standby={group: parts for group, parts in self.standby.items() if group not in lost})

    @property
    def standing_in(self) -> frozenset[Microbatch]:
        """The microbatches of standby parts that are contributed, because their contributors were lost."""
        return frozenset(m for group in self.standby for m in self.of(group) if self.part(group, m))

    def promoted(self, group: GroupId) -> tuple[int, ...]:
        """Return the numbers of the group's standby parts that it contributes, because their contributor was lost."""
        parts = self.standby.get(group, ())
        own = set(self.of(group)) if parts else ()
        return tuple(number for number, part in enumerate(parts, start=1) if part[0] in own)

    def standby_of(self, group: GroupId) -> tuple[Microbatch, ...]:
        """Return the microbatches that the group computes and does not contribute."""
        parts, promoted = self.standby.get(group, ()), self.promoted(group)
        return tuple(m for number, part in enumerate(parts, start=1) if number not in promoted for m in part)

    def part(self, group: GroupId, microbatch: Microbatch) -> int:
        """Return the number of the group's standby part with ``microbatch``; 0: its gradient is added to the group's own."""
        parts = self.standby.get(group, ())
        return next((number for number, part in enumerate(parts, start=1) if microbatch in part), 0)


@dataclass(frozen=True)
class Report:
    """The report that a survivor publishes when an epoch ends. Nothing of that epoch may finish at this group after it.

    Attributes:
        epoch: the epoch that ends.
        group: the group that reports.
        step: the step that the group works on, so ``step - 1`` is committed there.
        reduced_buckets: buckets of ``step`` whose reduction the host saw complete before the abort.
        synced: False until the group has received the model state that it starts from.
        complete: True if ``reduced_buckets`` are all buckets, so that the group can commit ``step`` without another group.
        attempt: how often the sums of ``step`` were discarded at the group; ``reduced_buckets`` are of this attempt.
    """

    epoch: int
    group: GroupId
    step: int
    reduced_buckets: tuple[Bucket, ...] = ()
    synced: bool = True
    complete: bool = False
    attempt: int = 0


class PlanOrigin(NamedTuple):
    """The origin of a step's plan.

    A group that joins in the middle of a step has no share of it, but takes over its part when another is lost.

    Attributes:
        live: the membership that the plan was made for.
        changes: (lost, joined) of every view since.
        past: for a policy whose plans depend on them, the losses of earlier steps since a group joined or the run began:
            for each step with losses, the groups that each of its views left out.
    """

    live: tuple[GroupId, ...]
    changes: tuple[tuple[tuple[GroupId, ...], tuple[GroupId, ...]], ...] = ()
    past: tuple[tuple[tuple[GroupId, ...], ...], ...] = ()

    def after(self, lost: Collection[GroupId], joined: Collection[GroupId]) -> PlanOrigin:
        change = (tuple(sorted(lost)), tuple(sorted(joined)))
        return self._replace(changes=(*self.changes, change)) if any(change) else self

    def following(self, live: tuple[GroupId, ...], remembers: bool) -> PlanOrigin:
        """Return the origin of the next step, which ``live`` begin. ``remembers``: the policy depends on the past."""
        if not remembers or any(joined for _, joined in self.changes):
            return PlanOrigin(live)
        losses = tuple(lost for lost, _ in self.changes)
        return PlanOrigin(live, past=(*self.past, losses) if losses else self.past)


@dataclass(frozen=True)
class View:
    """Numbered membership, and everything the survivors need to go on from it (architecture.md, step protocol 3-4).

    Attributes:
        epoch: number of the view.
        live: the members, ascending.
        reason: the best cause known when the view was proposed: the verdicts against the groups it leaves out, if any.
        step: the step that goes on.
        attempt: how often the sums of ``step`` were discarded; ``final`` holds buckets of this attempt.
        lost: members of the view before that are left out, each with the reason.
        joined: groups that enter with this view, and get the committed state by themselves.
        source: the group that hands the committed state to ``behind``; None if it is not needed.
        behind: groups that take the committed state from ``source`` first.
        final: bucket of ``step`` that some survivor holds finished -> the group that the others fetch it from.
        missing: bucket in ``final`` -> groups that lack it.
        plan_origin: plan origin of ``step``.
        incarnations: starts of the groups that were started more than once; 0 for the others.
        entered: group that has ever joined -> the step at which its newest start entered. A group that needs the state
            again in the step after that, because it could not finish the step, enters in the later one.
        reports: reports of the epoch before, from which all this was decided.
        noticed: what ended the epoch at the proposer, if that was not a verdict against a group but, for example, a
            broken connection, and differs from ``reason``; otherwise empty.
    """

    epoch: int
    live: tuple[GroupId, ...]
    reason: str
    step: int = 0
    attempt: int = 0
    lost: Mapping[GroupId, str] = field(default_factory=dict)
    joined: tuple[GroupId, ...] = ()
    source: GroupId | None = None
    behind: tuple[GroupId, ...] = ()
    final: Mapping[Bucket, GroupId] = field(default_factory=dict)
    missing: Mapping[Bucket, tuple[GroupId, ...]] = field(default_factory=dict)
    plan_origin: PlanOrigin = field(default=PlanOrigin(()), metadata={codec.STAYS: True})
    incarnations: Mapping[GroupId, int] = field(default_factory=dict)
    entered: Mapping[GroupId, int] = field(default_factory=dict)
    reports: tuple[Report, ...] = field(default=(), metadata={codec.STAYS: True})
    noticed: str = ""

    @property
    def members(self) -> list[tuple[GroupId, int]]:
        """The seats of this view: each member with its incarnation."""
        return [(group, self.incarnations.get(group, 0)) for group in self.live]

    def seats(self, group: GroupId, incarnation: int) -> bool:
        """Return whether that start of the group is a member."""
        return group in self.live and self.incarnations.get(group, 0) == incarnation

    def to_json(self) -> dict[str, Any]:
        raw = codec.encode_fields(self)
        told = {name: value for name, value in raw.items() if value or name not in ("attempt", "entered")}
        return {**told, "begun": codec.encode(self.plan_origin), "reports": _fold(self.reports)}

    def to_wire(self) -> dict[str, Any]:
        """Return a short form for the control store: every group reads it, and it may name thousands of groups."""
        raw = self.to_json()
        began, *since = raw["begun"]
        told = [[*said, spans(groups)] for *said, groups in raw["reports"]]
        missing = {bucket: spans(groups) for bucket, groups in raw["missing"].items()}
        some = {"live": spans(raw["live"]), "behind": spans(raw["behind"]), "begun": [spans(began), *since]}
        return {**raw, **some, "missing": missing, "reports": told}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> View:
        """Return the view of a :meth:`to_json` or :meth:`to_wire` form."""
        told = {one.name: raw[one.name] for one in fields(cls) if one.name in raw or one.name not in _MAY_LACK}
        told |= {"live": groups_of(raw["live"]), "behind": groups_of(raw["behind"])}
        told["missing"] = {bucket: groups_of(groups) for bucket, groups in raw["missing"].items()}
        reports = _unfold(raw["epoch"] - 1, told.pop("reports"))
        began, *since = raw["begun"]
        origin = codec.decode(PlanOrigin, [groups_of(began), *since])
        return replace(codec.decode_fields(cls, told), plan_origin=origin, reports=reports)


_MAY_LACK = ("attempt", "entered", "noticed", "plan_origin")
"""Fields that the JSON of a view may lack: some are left out if empty, older versions lack others, one is ``begun``."""


def listed(numbers: Iterable[int], most: int | None = None) -> str:
    """Return ``numbers`` as text, ``0 1 2``; beyond ``most`` of them as ``0 1 2 and 5 more``."""
    numbers = list(numbers)
    shown = numbers if most is None else numbers[:most]
    return " ".join(map(str, shown)) + (f" and {len(numbers) - len(shown)} more" if len(numbers) > len(shown) else "")


def named(groups: Collection[GroupId]) -> str:
    """Return groups as text, ``group 0`` or ``groups 1 2``."""
    return f"group{'s' * (len(groups) > 1)} {listed(groups)}"


def spans(groups: list[GroupId]) -> str:
    """Return ascending numbers as text, ``0-6 8 10-2047``."""
    spans: list[list[GroupId]] = []
    for group in groups:
        if spans and group == spans[-1][1] + 1:
            spans[-1][1] = group
        else:
            spans.append([group, group])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def groups_of(raw: str | list[GroupId]) -> tuple[GroupId, ...]:
    """Return the groups of a text (inverse of :func:`spans`) or of a list."""
    if not isinstance(raw, str):
        return tuple(raw)
    spans = (span.partition("-") for span in raw.split())
    return tuple(group for first, _, last in spans for group in range(int(first), int(last or first) + 1))


def _fold(reports: tuple[Report, ...]) -> list[list[Any]]:
    """Return reports as ``[step, have, synced, complete, attempt, groups]``, without an attempt that is 0: thousands of
    groups publish few distinct reports."""
    alike: dict[tuple[Any, ...], list[GroupId]] = {}
    for one in reports:
        attempt = (one.attempt,) if one.attempt else ()
        said = (one.step, one.reduced_buckets, one.synced, one.complete, *attempt)
        alike.setdefault(said, []).append(one.group)
    return [[step, list(have), *more, groups] for (step, have, *more), groups in alike.items()]


def _unfold(epoch: int, raw: list[list[Any]]) -> tuple[Report, ...]:
    found = [
        Report(epoch, group, step, tuple(have), synced, complete, *attempt)
        for step, have, synced, complete, *attempt, groups in raw
        for group in groups_of(groups)
    ]
    return tuple(sorted(found, key=lambda report: report.group))


def host_name(name: str, host_rank: int | None = None) -> str:
    """Return the text for a host in messages, ``host 1 (n3)``. Several hosts can have one name, as containers do.

    Args:
        name: with or without the address that the record's ``host`` has where several hosts have that name.
        host_rank: number of the host; None in a run on one host and in records of earlier versions, for ``host n3``.
    """
    return f"host {name}" if host_rank is None else f"host {host_rank} ({name.partition('(')[0]})"


def place_name(name: str, host_rank: int | None = None) -> str:
    """Return the text for a host after "on": the same as :func:`host_name`, but the name alone without a number."""
    return name if host_rank is None else host_name(name, host_rank)


def seat(group: GroupId, incarnation: int) -> str:
    """Return the name of a start of a group in keys and file names: ``3``, and ``3.2`` for its second restart."""
    return f"{group}.{incarnation}" if incarnation else str(group)


def rank_name(position: int, pid: int, host: str, host_rank: int | None = None) -> str:
    """Return a rank with its process as the subject of a sentence; ``host`` and ``host_rank`` as for :func:`host_name`."""
    where = place_name(host, host_rank)
    return f"rank {position} on {where} (pid {pid})" if host_rank is None else f"rank {position} on {where}, pid {pid},"


CUT_OFF = "cut off: "
"""Begins the reason why a group was left out whose host the others do not reach."""


@dataclass(frozen=True)
class Exit:
    """The end of a process, as the agent that waited for it saw it.

    Attributes:
        group: of the rank.
        position: of the rank in its group.
        pid: of the process.
        host: name of the host.
        signal: name of the signal that killed it, else None.
        code: its exit code; None if a signal killed it.
        detail: its last words, for people.
        microbatch: the one that it was computing, as ``str`` writes it; None if not known.
        host_rank: number of the host; None in a run on one host.
    """

    group: GroupId
    position: int
    pid: int
    host: str
    signal: str | None
    code: int | None
    detail: str = ""
    microbatch: str | None = None
    host_rank: int | None = None

    def __str__(self) -> str:
        how = self.signal if self.signal else f"exit code {self.code}"
        where = f" in microbatch {self.microbatch}" if self.microbatch else ""
        cause = f" ({self.detail})" if self.detail else ""
        return f"{rank_name(self.position, self.pid, self.host, self.host_rank)} ended with {how}{where}{cause}"
