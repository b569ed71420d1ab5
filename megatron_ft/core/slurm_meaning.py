"""What a state and an exit code of Slurm's mean for a run: every combination of them with what the run's record says.

Intuition. Slurm knows processes, the record knows the run. A step can have ended well on a node that was lost, a job can be
cancelled because its run is done, and one that has no batch node any more runs for ever. So the record says what became of
the run, and Slurm's word is explained with it, never the other way round.

Assumes: the record may have no end (it goes on, or all who could write are gone); it knows of a node that is lost long
before Slurm does; it may know nothing of the supervisor (an older version's), and then nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.core.slurm_said import ASKED, GONE, JOB, NODE, OPEN, UNKNOWN, Said, is_bad, is_given_up, is_unheard

_QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
_SIGNALS = {1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1", 11: "SEGV"}
_SIGNALS |= {12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM"}
_OUT_OF_MEMORY = 125
"""What Slurm calls the signal of a step that the kernel took memory from."""
_ELSE = {
    "TIMEOUT": "its time was up, and Slurm ended it",
    "DEADLINE": "its deadline was reached, and Slurm ended it",
    "PREEMPTED": "another job was given its nodes",
    "OUT_OF_MEMORY": "the kernel ended processes of it that needed more memory than they were allowed",
    "BOOT_FAIL": "a node of it did not boot",
    "REVOKED": "another cluster of the federation has started it",
    UNKNOWN: "Slurm does not know it any more: MinJobAge has passed (300 s, mostly) and there is no accounting",
}
_TIMEOUT = "until SlurmdTimeout has passed (300 s, mostly)"


@dataclass(frozen=True)
class Role:
    """What a step was: the agent of a first host (``host``: its number), one in ``reserve``, or a ``second`` supervisor.
    ``failures``: agents that had ended on that node before. ``attempt``: which start of the whole job it belongs to.
    ``t``: when it was asked for, 0 where that is unknown."""

    node: str = ""
    host: int | None = None
    reserve: bool = False
    second: bool = False
    failures: int = 0
    attempt: int = 0
    t: float = 0.0


@dataclass(frozen=True)
class Lost:
    """A node that was lost. ``why``: in the record's words. ``groups``: those that went on elsewhere, and ``to`` where."""

    why: str
    t: float = float("inf")
    groups: tuple[int, ...] = ()
    to: str = ""


@dataclass(frozen=True)
class Known:
    """What the record says of the newest start of a run.

    Args:
        code: 0 when it has got to its end, what it stopped with otherwise, None when the record has neither.
        why: it stopped.
        last: its last step so far.
        lost: nodes, by their short names.
        ranks: node -> what happened to ranks there.
        roles: by the names of steps.
        batch: the batch shell's node.
        took_over: the node of the supervisor that went on in the first one's place.
        cancelled: the node of the supervisor that ended the job by cancelling it.
        ended: what the supervisor in the batch shell has ended with, and the shell after it; None: it has not.
        overdue: steps that did not end with the run; the supervisor cancelled them.
        drained: nodes that got no further agent, and why.
        restarts: how often Slurm has started the job again.
        requeued: why the job was put back into the queue, by what ``restarts`` was then.
        attempt: the newest start of the whole job within its allocation.
    """

    code: int | None = None
    why: str = ""
    last: int | None = None
    lost: Mapping[str, Lost] = field(default_factory=dict)
    ranks: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    batch: str = ""
    took_over: str = ""
    cancelled: str = ""
    ended: int | None = None
    overdue: frozenset[str] = frozenset()
    drained: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    requeued: Mapping[int, str] = field(default_factory=dict)
    attempt: int = 0

    @property
    def put_back(self) -> str:
        """Why the newest start of the job was put back into the queue; "" if it was not."""
        return self.requeued.get(self.restarts, "")


@dataclass(frozen=True)
class Meaning:
    """``what`` it was, and what Slurm's word ``means`` for this run."""

    what: str
    means: str


def short(node: str) -> str:
    """Slurm's name of a node and its host name may differ in the domain; two hosts of one name have addresses behind it."""
    return node.partition("(")[0].partition(".")[0]


def role_of(name: str, known: Known) -> Role | None:
    """Of the step of that name; None if it is not one of ours."""
    if name in known.roles:
        return known.roles[name]
    kind, *parts = name.split("/")
    if kind == "mft" and len(parts) == 3 and parts[2].isdecimal():
        attempt = int(parts[0]) if parts[0].isdecimal() else 0
        return Role(node=parts[1], reserve=parts[2] != "0", failures=int(parts[2]), attempt=attempt)
    return Role(second=True) if kind == "mft-second" else None


def run_words(known: Known) -> str:
    """What became of the run."""
    if known.code is None:
        return "the record has no end of the run" + ("" if known.last is None else f" (last step: {known.last})")
    if known.code == 0:
        return "the run got to its end"
    return f"the run stopped (exit code {known.code}" + (f": {known.why})" if known.why else ")")


def exit_words(said: Said) -> str:
    """What it ended with, in words; "" where Slurm does not say."""
    code, number = said.code, said.signal
    if said.srun is not None and not said.exit:
        code, number = (said.srun, 0) if said.srun >= 0 else (0, -said.srun)
    if number == _OUT_OF_MEMORY:
        return "memory ran out"
    if number:
        return signal_words(number)
    if code is None:
        return ""
    return f"exit code {code}" + (f" ({signal_words(code - 128)}, says a shell)" if code - 128 in _SIGNALS else "")


def signal_words(number: int) -> str:
    return f"SIG{_SIGNALS[number]}" if number in _SIGNALS else f"signal {number}"


def explain(said: Said, known: Known) -> Meaning:
    """Never empty; says of the run what the record says, and of a node that it was lost only where the record does."""
    if said.kind == NODE:
        return Meaning("node", _node(said, known))
    own = said.id.partition(".")[2] if "." in said.id else ""
    if own == "extern":
        return Meaning("Slurm's own step", "for what comes in by ssh; it says nothing of the run")
    if said.start:
        return _earlier(said, known, own)
    if said.kind == JOB:
        return Meaning("the job", _job(said, known))
    if own == "batch" or said.name == "batch":
        return Meaning("batch shell", _batch(said, known))
    role = role_of(said.name, known)
    if role is None:
        return Meaning("not one of ours", "somebody else's step in this job; it says nothing of the run")
    return Meaning(_what(role), _second(said, known) if role.second else _agent(said, role, known))


def _earlier(said: Said, known: Known, own: str) -> Meaning:
    why = known.requeued.get(known.restarts - said.start, "")
    why = f" ({why})" if why else ""
    again = f"an earlier start of the job, which was put back into the queue{why}; the newest one counts"
    role = None if said.kind == JOB else role_of(said.name, known)
    return Meaning("the job" if said.kind == JOB else "batch shell" if own == "batch" else _what(role), again)


def _what(role: Role | None) -> str:
    if role is None:
        return "not one of ours"
    if role.second:
        return "second supervisor" + (f", on {role.node}" if role.node else "")
    after = f", the {role.failures + 1}. there" if role.failures else ""
    if role.host is None:
        return ("agent in reserve" if role.reserve else "agent") + after
    return f"agent of host {role.host}" + (", in reserve" if role.reserve else "")


# --- the job and its batch shell --------------------------------------------------------------------------------------


def _job(said: Said, known: Known) -> str:
    run, base, ended = run_words(known), said.base, exit_words(said)
    if base == "COMPLETED":
        return _completed(known, run)
    if base == "FAILED":
        return _failed(said, known, run)
    if base == "CANCELLED":
        if known.cancelled:
            second = f"the second supervisor, on {known.cancelled},"
            return f"{run}; {_batch_lost(known)}, and nobody but {second} could end the job: it cancelled it"
        return f"{_whose(said)} cancelled it, not a supervisor; {run}"
    if base == "NODE_FAIL":
        batch = f" ({known.batch} was the batch node)" if known.batch else ""
        return f"Slurm gave up a node and ended the job, as it does for its batch node{batch}; {run}"
    if base in _QUEUED:
        return _queued(said, known, run)
    if base == "COMPLETING":
        lost = f"; lost nodes ({' '.join(sorted(known.lost))}) keep it waiting {_TIMEOUT}" if known.lost else ""
        return f"Slurm waits for its last processes to end{lost}; {run}"
    if base in OPEN:
        return _job_runs(said, known, run)
    return f"{_other(base)}{f' ({ended})' if ended else ''}; {run}{_later(known)}"


def _completed(known: Known, run: str) -> str:
    if known.code == 0:
        return f"{run}, and the batch shell said so"
    if known.put_back:
        return f"0 is the batch shell's, because the job was to go on later ({known.put_back}); {run}"
    return f"0 is the batch shell's and says nothing of the run; {run}{_later(known)}"


def _failed(said: Said, known: Known, run: str) -> str:
    ended = exit_words(said) or "something else than 0"
    if known.code == 0:
        return f"{run}; what failed came after it: the batch script ended with {ended}"
    if known.code is not None and said.code == known.code:
        return f"{run}; the batch shell has passed that on"
    return f"the batch script ended with {ended}; {run}{_later(known)}"


def _later(known: Known) -> str:
    return "; the same script goes on from the newest checkpoint, if there are any" if known.code != 0 else ""


def _queued(said: Said, known: Known, run: str) -> str:
    why = f" ({known.put_back})" if known.put_back else ""
    if said.reason == "BeginTime":
        now = f"scontrol update jobid={said.number} StartTime=now"
        return f"put back into the queue{why}, it starts two minutes later at the soonest (at once: {now}); {run}"
    if said.base == "PENDING":
        return f"it waits in the queue{f', reason {said.reason}' if said.reason else ''}{why}; {run}"
    held = "; scontrol release " + said.number if said.base in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD") else ""
    return f"it is put back into the queue{why}{held}; {run}"


def _job_runs(said: Said, known: Known, run: str) -> str:
    stopped = "; its processes are stopped (scontrol resume, or SIGCONT)" if said.base in ("SUSPENDED", "STOPPED") else ""
    if known.code is None and not known.took_over:
        return f"it runs{stopped}; {run}"
    if known.code is None:
        return f"it runs{stopped}, looked after by the second supervisor on {known.took_over}: {_batch_lost(known)}; {run}"
    else_ = f"if it does not: scancel {said.number}"
    if known.ended is not None:
        seen = "after that it ended" if said.t else "it is about to end; " + else_
        return f"{run}; the supervisor, and with it the batch shell, ended with exit code {known.ended}, and {seen}"
    if known.cancelled:
        seen = "cancelled it after that" if said.t else "has cancelled it"
        return f"{run}; {_runs_on(known)}: the second supervisor, on {known.cancelled}, {seen}"
    if known.took_over or short(known.batch) in known.lost:
        who = f"the second supervisor, on {known.took_over}," if known.took_over else "a second supervisor"
        return f"{run}; {_runs_on(known)}: {who} cancels it within a minute; {else_}"
    return f"{run}; its batch shell is about to end; {else_}"


def _runs_on(known: Known) -> str:
    return f"{_batch_lost(known)}, and Slurm lets a job without it run on"


def _batch_lost(known: Known) -> str:
    """Why the first supervisor does not look after the job."""
    node = short(known.batch)
    if node in known.lost:
        return f"its batch node, {known.batch}, was lost ({known.lost[node].why})"
    return "the first supervisor" + (f", on the batch node {known.batch}," if known.batch else "") + " fell silent"


def _whose(said: Said) -> str:
    """``CANCELLED by 1000``."""
    words = said.state.split()
    return f"user {words[2]}" if len(words) > 2 and words[1] == "by" else "somebody"


def _other(base: str) -> str:
    return _ELSE.get(base, f"{base} is a state that is not known here")


def _batch(said: Said, known: Known) -> str:
    run, base, node = run_words(known), said.base, short(known.batch or said.nodes)
    if node in known.lost and base not in ("COMPLETED", "FAILED"):
        then = {"NODE_FAIL": "Slurm has noticed", "CANCELLED": "it was ended with the job"}.get(base, _other(base))
        then = f"Slurm does not give it up {_TIMEOUT}" if base in OPEN else then
        return f"its node, {node}, was lost ({known.lost[node].why}); {then}; {run}"
    if base == "COMPLETED":
        return _completed(known, run)
    if base == "FAILED":
        return _failed(said, known, run)
    if base == "CANCELLED":
        return f"it was ended with the job{_by(exit_words(said))}; {run}"
    if base == "NODE_FAIL":
        return f"Slurm gave its node up; {run}"
    if base in OPEN:
        return f"it runs; {run}"
    return f"{_other(base)}; {run}"


# --- agents and the second supervisor ---------------------------------------------------------------------------------


def _agent(said: Said, role: Role, known: Known) -> str:
    node = short(role.node or said.nodes)
    if role.attempt < known.attempt:
        which = f"one of an earlier start of the whole job, number {role.attempt}"
        return f"{which}: no group was left, and all were started again; {run_words(known)}"
    lost = known.lost.get(node)
    if lost is not None and lost.t >= role.t:
        return _on_lost(said, node, lost, known)
    ranks = f"; {known.ranks[node]}" if node in known.ranks else ""
    drained = f"; no further agent there: {known.drained[node]}" if node in known.drained else ""
    return f"{_on_well(said, known)}{ranks}{drained}"


def _on_lost(said: Said, node: str, lost: Lost, known: Known) -> str:
    base = said.base
    was = f"{node} was lost ({lost.why})"
    if lost.groups and lost.to:
        which = f"group{'s' if len(lost.groups) > 1 else ''} {' '.join(map(str, lost.groups))}"
        was += f", its {which} went on on {lost.to}"
    if base in OPEN:
        over = "" if known.code is None else "; nobody waits for it"
        return f"{was}; Slurm lists its step {_TIMEOUT} or it is back{over}"
    if base == "COMPLETED":
        return f"0 although {was}: nobody was left there to say otherwise"
    if base == "NODE_FAIL":
        return f"Slurm has noticed, too: {was}"
    if base == GONE:
        return f"{was}; srun ended{_by(exit_words(said))}, which is not to be relied on"
    return f"{was}; {_ended(said)}"


def _ended(said: Said) -> str:
    """For what Slurm calls so, whatever the reason."""
    words = {"CANCELLED": "the step was cancelled then", "FAILED": "the step ended then", UNKNOWN: _ELSE[UNKNOWN]}
    return words.get(said.base, _other(said.base)) + _by(exit_words(said))


def _on_well(said: Said, known: Known) -> str:
    base, ended, over = said.base, exit_words(said), known.code is not None
    run = run_words(known)
    if base in OPEN:
        if not over:
            return "it was asked for" if base == ASKED else "it runs"
        return f"{run}, and it ends; if it is listed for long only its slurmstepd has died: scancel {said.id or said.name}"
    if said.name in known.overdue:
        return f"{run}, and it did not end by itself: the supervisor cancelled it"
    if base == "CANCELLED":
        if known.cancelled:
            return f"it was ended with the job, which the second supervisor cancelled; {run}"
        if over:
            return f"it was ended with the job; {run}"
        return f"it was cancelled{_by(ended)}: its srun was killed, or somebody did it; {run}"
    if base == "NODE_FAIL":
        return f"Slurm gave its node up; the record has missed nothing of it; {run}"
    if base == GONE and said.srun is None:
        return f"it has ended; with what, only accounting could say; {run}"
    if base == "COMPLETED" or (base == GONE and said.srun == 0):
        return f"it ended in order; {run}"
    if base in ("FAILED", GONE):
        if over and known.code and known.code in (said.code, said.srun):
            return f"it ended with what the run ended with; {run}"
        own = "by itself or was killed, and " + ("the others went on; " if known.code == 0 else "") + run
        return f"it ended{_by(ended)}: {own}"
    return f"{_other(base)}{_by(ended)}; {run}"


def _second(said: Said, known: Known) -> str:
    base, ended = said.base, exit_words(said)
    node = short(known.roles[said.name].node if said.name in known.roles else said.nodes)
    if node in known.lost:
        return f"{node} was lost ({known.lost[node].why}); while the run goes on another one is started elsewhere"
    if base in OPEN:
        if known.code is None:
            first = node and node == short(known.took_over)
            return "it goes on in the first one's place" if first else "it waits, in case the first one is lost"
        if known.cancelled and node == short(known.cancelled):
            return f"it cancelled the job after that: the first supervisor was lost; {run_words(known)}"
        return f"it ends with the job; {run_words(known)}"
    if known.cancelled and node == short(known.cancelled):
        return f"it cancelled the job, and was ended with it{_by(ended)}: the first supervisor was lost; {run_words(known)}"
    if base == "NODE_FAIL":
        return f"Slurm gave its node up; {run_words(known)}"
    if base == "COMPLETED" or (base == GONE and said.srun == 0):
        return f"it ended in order; {run_words(known)}"
    if base in ("CANCELLED", "FAILED", GONE):
        needed = "" if known.took_over or known.code is None else "nobody needed it: "
        return f"{needed}the first supervisor ends it with the job{_by(ended)}; {run_words(known)}"
    return f"{_other(base)}{_by(ended)}; {run_words(known)}"


def _by(ended: str) -> str:
    return f" ({ended})" if ended else ""


def _node(said: Said, known: Known) -> str:
    lost = known.lost.get(short(said.name))
    if lost is not None:
        was = f"it was lost ({lost.why})"
        if is_given_up(said):
            return f"{was}; Slurm has given it up"
        unheard = "hears nothing of it, either, and" if is_unheard(said) else "has not noticed, and"
        return f"{was}; Slurm {unheard} does not give it up {_TIMEOUT}"
    if is_bad(said):
        return "Slurm does not use it; the record has missed nothing of it"
    return "Slurm hears it"
