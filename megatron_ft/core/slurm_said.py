"""What Slurm says of a job, its steps and its nodes: read from the text of its commands, and compared from look to look.

Intuition. The same few words come from several places: ``sacct`` remembers steps that have ended, where a cluster has
accounting; ``squeue`` and ``scontrol`` know only what is there, and a job for some minutes after its end. All become
:class:`Said`, so that who explains them (``core.slurm_meaning``) need not know where they are from.

Assumes: text of any version of Slurm, possibly pasted, cut off, or of another job; what cannot be read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

JOB, STEP, NODE = "job", "step", "node"
ASKED, GONE, UNKNOWN = "ASKED", "GONE", "UNKNOWN"
"""Not Slurm's words: a step was asked for; Slurm lists it no more, and how it ended nobody could see; nothing is said."""
OPEN = frozenset({"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
OPEN |= {"RESIZING", ASKED}
"""What has not ended."""
SACCT = ("JobIDRaw", "JobName", "State", "ExitCode", "NodeList")
"""The columns that are asked for; JobID would name an element of an array by the array."""
_IDS, _NEEDED = ("JobIDRaw", "JobID"), {"State", "ExitCode"}
_NO_NODES = ("", "(null)", "None assigned", "None", "N/A")
_NOTHING = {"nodes": _NO_NODES, "reason": ("", "None", "(null)")}


@dataclass(frozen=True)
class Said:
    """One job, step or node as Slurm has it. ``exit``: ``CODE:SIGNAL``, "" where Slurm does not say. ``nodes`` may be a
    list such as ``n[1-3]``. ``srun``: what the step's srun ended with, as subprocess has it, where it was ours. ``by``: the
    command; ``t``: when (s since 1970), 0: now. ``start``: 0 is the newest start of the job, 1 the one before."""

    kind: Literal["job", "step", "node"]
    name: str
    state: str
    id: str = ""
    exit: str = ""
    nodes: str = ""
    reason: str = ""
    srun: int | None = None
    by: str = ""
    t: float = 0.0
    start: int = 0

    @property
    def base(self) -> str:
        """The state in one word: without who has cancelled it, and without the marks of ``sinfo``."""
        words = self.state.split()
        return words[0].rstrip("*~#!%$@^+-").upper() if words else UNKNOWN

    @property
    def number(self) -> str:
        """Of the job."""
        return self.id.partition(".")[0]

    @property
    def code(self) -> int | None:
        return _part(self.exit, 0)

    @property
    def signal(self) -> int | None:
        return _part(self.exit, 1)


def _part(exit_: str, which: int) -> int | None:
    parts = exit_.split(":")
    return int(parts[which]) if len(parts) == 2 and parts[which].isdecimal() else None


def to_line(said: Said) -> dict[str, Any]:
    """For the run record, without what is empty."""
    own = {field.name: getattr(said, field.name) for field in fields(said) if field.name not in ("kind", "t", "start")}
    return {"what": said.kind, **{name: value for name, value in own.items() if value not in ("", None)}}


def from_line(line: Mapping[str, Any]) -> Said | None:
    """Of the run record; None for another line."""
    if line.get("event") != "slurm" or line.get("what") not in (JOB, STEP, NODE) or "state" not in line:
        return None
    known = {field.name for field in fields(Said)} - {"kind", "start"}
    given = {name: value for name, value in line.items() if name in known}
    return Said(**{"name": "", **given}, kind=line["what"])


def key(said: Said) -> tuple[str, str]:
    """What it is about."""
    return said.kind, said.number if said.kind == JOB else said.name


def changed(before: Mapping[tuple[str, str], Said], now: Iterable[Said]) -> list[Said]:
    """What of ``now`` is news: another state, exit code, reason or node."""
    return [said for said in now if _told(before.get(key(said))) != _told(said)]


def _told(said: Said | None) -> tuple[str, ...]:
    return () if said is None else (said.state, said.exit, said.reason, said.nodes, str(said.srun))


def gone(before: Mapping[tuple[str, str], Said], listed: Iterable[str], sruns: Mapping[str, int | None]) -> list[Said]:
    """Steps that were listed once and are not any more. ``sruns``: name -> what its srun has ended with, None: it has not;
    it may not have asked yet, or be about to ask again."""
    there = set(listed)
    ended = []
    for (kind, name), said in before.items():
        srun = sruns.get(name)
        news = said.base in OPEN or (said.state == GONE and said.srun is None and srun is not None)
        if kind == STEP and name not in there and news and not (said.state == ASKED and srun is None):
            ended.append(replace(said, state=GONE, exit="", srun=srun, by="squeue", t=0.0))
    return ended


def is_bad(said: Said) -> bool:
    """Whether Slurm does not hear that node, or does not use it."""
    return is_unheard(said) or is_given_up(said) or said.base.startswith("DRAIN")


def is_unheard(said: Said) -> bool:
    """Whether the node has not answered lately; after SlurmdTimeout it is given up."""
    return "*" in said.state


def is_given_up(said: Said) -> bool:
    return said.base.startswith(("DOWN", "FAIL", "ERROR", "UNKNOWN"))


# --- text -------------------------------------------------------------------------------------------------------------


def sacct(text: str) -> list[Said]:
    """``sacct --parsable2`` (or ``--parsable``) with a header, in any order of columns; empty for anything else.

    A requeued job is listed several times (``--duplicates``), the oldest first: those are its ``start``.
    """
    lines = [line for line in text.splitlines() if "|" in line]
    heads = [number for number, line in enumerate(lines) if _is_head(line.split("|"))]
    if not heads:
        return []
    columns = lines[heads[0]].split("|")
    own = next(column for column in _IDS if column in columns)
    rows = [dict(zip(columns, line.split("|"), strict=False)) for line in lines[heads[0] + 1 :]]
    rows = [row for row in rows if row.get(own, "")[:1].isdecimal() and row.get("State")]
    found = [
        Said(
            kind=STEP if "." in row[own] else JOB,
            id=row[own],
            name=row.get("JobName") or row[own].partition(".")[2],
            state=row["State"],
            exit=row.get("ExitCode", ""),
            nodes=_given("nodes", row.get("NodeList", "")),
            reason=_given("reason", row.get("Reason", "")),
            by="sacct",
        )
        for row in rows
    ]
    return _in_starts(found)


def _is_head(columns: Sequence[str]) -> bool:
    return set(columns) >= _NEEDED and not set(columns).isdisjoint(_IDS)


def _in_starts(rows: list[Said]) -> list[Said]:
    """Steps follow their job; each job's last row is its newest start."""
    starts: dict[str, int] = {}
    found: list[Said] = []
    for row in rows:
        if row.kind == JOB:
            starts[row.number] = starts.get(row.number, 0) + 1
        found.append(replace(row, start=starts.get(row.number, 1)))
    return [replace(row, start=max(0, starts.get(row.number, 1) - row.start)) for row in found]


def scontrol_job(text: str) -> Said | None:
    """``scontrol --oneliner show job ID``; None if it is nothing of that kind."""
    return next(iter(_scontrol_jobs(text)), None)


def _scontrol_jobs(text: str) -> list[Said]:
    return [_scontrol(shown) for shown in map(fields_of, _records(text, "JobId=")) if "JobState" in shown]


def _records(text: str, first: str) -> list[str]:
    """``scontrol show``'s, each in one line or in several."""
    parts = text.split(first)
    return [first + part for part in parts[1:]]


def fields_of(text: str) -> dict[str, str]:
    """``Name=value`` of ``scontrol``; a value with blanks in it is cut off."""
    return {name: value for name, equals, value in (word.partition("=") for word in text.split()) if equals}


def _scontrol(shown: Mapping[str, str]) -> Said:
    return Said(
        kind=JOB,
        id=shown["JobId"],
        name=shown.get("JobName", ""),
        state=shown["JobState"],
        exit=shown.get("ExitCode", ""),
        nodes=_given("nodes", shown.get("NodeList", "")),
        reason=_given("reason", shown.get("Reason", "")),
        by="scontrol",
    )


SQUEUE_STEPS = "%i|%j|%N"
"""The format of squeue --steps that :func:`squeue_steps` reads."""


def squeue_steps(text: str) -> list[Said]:
    """What ``squeue --steps --noheader --format=SQUEUE_STEPS`` lists: all of them run."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2 and line[:1].isdigit()]
    return [
        Said(kind=STEP, id=number, name=name, state="RUNNING", nodes=_given("nodes", nodes), by="squeue")
        for number, name, nodes in rows
    ]


def sinfo_nodes(text: str) -> list[Said]:
    """Lines of a node's name and its state."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines())
    found = {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}
    return [Said(kind=NODE, name=name, state=state, by="sinfo") for name, state in found.items()]


def pasted(text: str) -> list[Said]:
    """Whichever of ``sacct``, ``scontrol show job`` and ``squeue --steps`` it is, or several one after the other."""
    return [*sacct(text), *_scontrol_jobs(text), *squeue_steps(text)]


def _given(what: str, value: str) -> str:
    return "" if value in _NOTHING[what] else value
