"""The section "Slurm" of the report: what Slurm says of the job, its steps and nodes, and what that means for the run.

What is said comes from the record (the supervisor has noted what it saw), from Slurm now, or from a file that somebody has
sent. What it means is decided in ``core.slurm_meaning``, from what the record knows of the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_meaning import Known, Lost, Role, explain, run_words, short
from megatron_ft.core.slurm_said import JOB, NODE, STEP, Said
from megatron_ft.errors import LaunchError
from megatron_ft.report.record import RunRecord
from megatron_ft.report.words import happened
from megatron_ft.runtime import history

_HOW = f"sacct -j JOB --duplicates --parsable2 --format={','.join(slurm_said.SACCT)} > FILE"
_ALIKE = 8
"""More agents of which the same is to be said have one row."""
_EARLIER = "earlier"
"""Where ``launch`` puts the records of the starts before."""
Line = Mapping[str, Any]


def supervised(record: RunRecord) -> bool:
    return bool(record.events("slurm"))


def jobs(record: RunRecord) -> list[str]:
    """Their ids, the newest last."""
    return list(dict.fromkeys(line["job"] for line in record.events("slurm")))


def cluster(record: RunRecord) -> str | None:
    return next((line["cluster"] for line in reversed(record.events("slurm")) if "cluster" in line), None)


def read(path: Path) -> list[Said]:
    """What somebody has sent. Raises ``LaunchError`` for what cannot be read."""
    try:
        found = slurm_said.pasted(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise LaunchError(f"--sacct {path}: {error.strerror}; give the file that sacct's output is in") from None
    if not found:
        raise LaunchError(
            f"--sacct {path} has no table of sacct's with JobID, State and ExitCode; have it made by: {_HOW}; or, without "
            f"accounting, by: scontrol show job JOB > FILE"
        )
    return found


def of_these_jobs(record: RunRecord, given: Iterable[Said], source: str) -> list[Said]:
    """Those of ``given`` that are about the run's jobs. Raises ``LaunchError`` when there are others only."""
    given, ours = list(given), jobs(record)
    own = [said for said in given if said.kind == NODE or said.number in ours]
    if given and not own:
        others = ", ".join(sorted({said.number for said in given}))
        raise LaunchError(f"{source} is of job {others}, and this run was job {', '.join(ours)}; give the one of that job")
    return own


def said_in_record(record: RunRecord) -> list[Said]:
    """The last word of each: job, steps and nodes that Slurm had something to say about."""
    last: dict[tuple[str, str], Said] = {}
    for line in record.events("slurm"):
        said = slurm_said.from_line(line)
        if said is not None:
            last[slurm_said.key(said)] = _filled(said, last.get(slurm_said.key(said)))
    return list(last.values())


def merged(recorded: Sequence[Said], newer: Sequence[Said]) -> list[Said]:
    """Slurm's own word now, and the record's about what Slurm has forgotten."""
    known = {slurm_said.key(said): said for said in recorded}
    found = [said if said.start else _filled(said, known.get(slurm_said.key(said))) for said in newer]
    about = {slurm_said.key(said) for said in found if not said.start}
    left = [said for said in recorded if slurm_said.key(said) not in about]
    return sorted([*found, *left], key=_order)


def _filled(said: Said, before: Said | None) -> Said:
    """With what is known from before and does not change."""
    if before is None:
        return said
    srun = before.srun if said.srun is None else said.srun
    return replace(said, nodes=said.nodes or before.nodes, id=said.id or before.id, srun=srun)


def _order(said: Said) -> tuple:
    """Nodes last; of each start of each job itself first, then the batch shell, then steps as they were started."""
    own = said.id.partition(".")[2]
    step = (own.isdecimal() or not own, int(own) if own.isdecimal() else 0, said.name)
    return said.kind == NODE, len(said.number), said.number, -said.start, said.kind != JOB, step


def known(record: RunRecord) -> Known:
    """What the record says of the run; of its earlier starts only what Slurm's words may still be about."""
    lines = record.lines
    notes = [*_earlier(record.run_dir), *record.events("slurm")]
    code, why = _end(lines)
    seen = [line for line in notes if line["what"] == STEP]
    last = [line["step"] for line in lines if line["event"] == "step"]
    own = record.events("slurm")
    return Known(
        code=code,
        why=why,
        last=max(last) if last else None,
        lost=lost(lines),
        ranks=_ranks(lines),
        roles=_roles(seen),
        batch=next((line["batch"] for line in reversed(own) if "batch" in line), ""),
        took_over=next((line["node"] for line in reversed(own) if line["what"] == "takes over"), ""),
        cancelled=next((line["node"] for line in reversed(own) if line["what"] == "cancels the job"), ""),
        ended=next((line["exit_code"] for line in reversed(own) if line["what"] == "ends"), None),
        overdue=frozenset(line["name"] for line in own if line["what"] == "cancelled step"),
        drained={line["node"]: line["reason"] for line in own if line["what"] == "drained"},
        restarts=max((line["restarts"] for line in notes if "restarts" in line), default=0),
        requeued=_requeued(notes),
        attempt=max((_attempt(line["name"]) for line in record.events("slurm") if line["what"] == STEP), default=0),
    )


def _earlier(run_dir: Path) -> list[Line]:
    found = []
    for start in sorted((run_dir / _EARLIER).glob("*")):
        found += [line for line in history.read(start) if line["event"] == "slurm"]
    return found


def _end(lines: Sequence[Line]) -> tuple[int | None, str]:
    code, why = None, ""
    for line in lines:
        if line["event"] == "start":
            code, why = None, ""
        elif line["event"] == "end":
            code, why = 0, ""
        elif line["event"] == "stop" and code != 0:
            code, why = line["exit_code"], line["reason"]
    return code, why


def _requeued(notes: Sequence[Line]) -> dict[int, str]:
    found: dict[int, str] = {}
    restarts = 0
    for line in notes:
        restarts = line.get("restarts", restarts)
        if line["what"] == "requeued":
            found[restarts] = line["reason"]
    return found


def _attempt(name: str) -> int:
    parts = name.split("/")
    return int(parts[1]) if parts[0] == "mft" and len(parts) == 4 and parts[1].isdecimal() else 0


def _roles(seen: Sequence[Line]) -> dict[str, Role]:
    found: dict[str, Role] = {}
    for line in seen:
        name = line["name"]
        if "role" in line and name not in found:
            last = name.rpartition("/")[2]
            found[name] = Role(
                node=line["node"],
                host=line.get("host"),
                reserve=line["role"] == "reserve",
                second=line["role"] == "second",
                failures=int(last) if line["role"] != "second" and last.isdecimal() else 0,
                attempt=_attempt(name),
                t=line["t"],
            )
    return found


def _ranks(lines: Sequence[Line]) -> dict[str, str]:
    """Node -> what its ranks ended with, and whether their groups are back."""
    found: dict[str, list[str]] = {}
    returns = [(line["group"], line["t"]) for line in lines if line["event"] == "rejoined"]
    for line in lines:
        if line["event"] == "fault":
            group = line["group"]
            back = "came back" if any(who == group and t > line["t"] for who, t in returns) else "did not come back"
            text = f"its rank {line['position']} of group {group} {happened(line)}, and the group {back}"
            found.setdefault(short(line["host"]), []).append(text)
    return {node: "; ".join(dict.fromkeys(texts)) for node, texts in found.items()}


def lost(lines: Sequence[Line]) -> dict[str, Lost]:
    """Nodes that were lost with their agent: those that others heard nothing of, and that are silent still or were replaced.

    A host that is cut off hears nothing of all others, and says so. Who is silent for the most hosts is the lost one.
    """
    standing: dict[tuple[str, str], Line] = {}
    found: dict[str, Lost] = {}
    for line in lines:
        if line["event"] == "silence":
            pair = (short(line["by"]), short(line["about"]))
            if line["heard"]:
                standing.pop(pair, None)
            else:
                standing.setdefault(pair, line)
        elif line["event"] == "view":
            for group in map(int, line["lost"]):
                for (by, about), said in standing.items():
                    if group in said["groups_about"] and by not in found and about not in found:
                        found[about] = Lost(_why(said), said["t"], tuple(said["groups_about"]))
    while rest := {pair: said for pair, said in standing.items() if not found.keys() & set(pair)}:
        others = Counter(host for pair in rest for host in pair)
        accused = Counter(about for _, about in rest)
        node = max(others, key=lambda host: (others[host], accused[host], host))
        said = next((said for (_, about), said in rest.items() if about == node), next(iter(rest.values())))
        found[node] = Lost(_why(said), said["t"], tuple(said["groups_about"]) if short(said["about"]) == node else ())
    return {node: replace(its, to=_new_home(its, lines)) for node, its in found.items()}


def _why(said: Line) -> str:
    return f"nothing was heard of it from {time.strftime('%H:%M:%S', time.localtime(said['t'] - said['silent_s']))} on"


def _new_home(its: Lost, lines: Sequence[Line]) -> str:
    homes = [line["host"] for line in lines if line["event"] == "host" and line["what"] == "took over" and line["t"] >= its.t
             and set(line["groups"]) & set(its.groups)]
    return " ".join(dict.fromkeys(map(short, homes)))


def slurm_table(record: RunRecord, newer: Sequence[Said] = ()) -> Table:
    """One row for the job and each of its steps, or for many that are alike; nodes only where Slurm has something to say
    against them."""
    about = known(record)
    table = Table(title=f"Slurm: job {', '.join(jobs(record))}", title_justify="left", show_lines=True)
    for name in ("what", "node", "Slurm says", "what that means"):
        table.add_column(name, overflow="fold")
    for row in _rows(merged(said_in_record(record), newer), about):
        table.add_row(*row)
    whose = "what was seen at a time is from there, too, the rest Slurm's own word" if newer else "and what Slurm said"
    table.caption = f"{run_words(about)}, says the record{';' if newer else ','} {whose}"
    table.caption_justify = "left"
    return table


def _rows(said: Iterable[Said], about: Known) -> list[tuple[str, str, str, str]]:
    alike: dict[object, list[tuple[str, str, str, str]]] = {}
    order: list[object] = []
    for one in said:
        if one.kind == NODE and not slurm_said.is_bad(one):
            continue
        meaning = explain(one, about)
        what = meaning.what if one.kind == NODE or not one.id else f"{meaning.what} ({one.id})"
        row = (what, _where(one, about), _words(one), meaning.means)
        agents = meaning.what.startswith("agent")
        order.append((_words(replace(one, t=0.0)), meaning.means) if agents else one)
        alike.setdefault(order[-1], []).append(row)
    found = []
    for which in order:
        if len(alike[which]) > _ALIKE:
            nodes = [row[1] for row in alike[which]]
            some = " ".join(nodes[:_ALIKE]) + f" and {len(nodes) - _ALIKE} more"
            alike[which] = [(f"{len(nodes)} agents", some, *alike[which][-1][2:])]
        found += alike[which][:1]
        alike[which] = alike[which][1:]
    return found


def _where(said: Said, about: Known) -> str:
    if said.kind == NODE:
        return said.name
    if said.name == "batch":
        return said.nodes or about.batch
    role = about.roles.get(said.name)
    return role.node if role is not None and role.node else said.nodes


def _words(said: Said) -> str:
    if said.state == slurm_said.GONE:
        ended = "" if said.srun is None else f", srun ended with {said.srun}"
        words = f"listed no more{ended}"
    else:
        words = " ".join(part for part in (said.state, said.exit, f"({said.reason})" if said.reason else "") if part)
    seen = f", seen {time.strftime('%H:%M:%S', time.localtime(said.t))}" if said.t else ""
    return f"{words}{seen}"
