"""The checks of one kind of communicator, on a team of real processes.

Each check begins with a whole team and a communicator of its own, so one that fails does not spoil those after it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence

from megatron_ft.cluster.doctor.meeting import Message
from megatron_ft.cluster.qualify.outcomes import CheckFailed, Found, Measured, NotHere, Qualification
from megatron_ft.cluster.qualify.team import Team
from megatron_ft.run.collectives.base import GRACE_S
from megatron_ft.run.collectives.nccl_communicator import ABORT_TIMEOUT_S
from megatron_ft.types import named

MIB = 1 << 20
SIZES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Bytes of a tensor, by the kind of device."""
_LAYERS = {"cpu": (512, 4), "cuda": (4096, 8)}
"""Width and number of layers of the model in the check of overlap."""
_PENDING = MIB
_ALONE_S = 1.0
"""How long it is looked whether waits end without the news of the loss."""
_NEWS_S = GRACE_S + 5.0
"""Within this time after the news every wait has to have ended. ``GRACE_S`` is an abandoned operation's; the rest is for a
busy machine."""


class CommunicatorChecks:
    """All checks of ``kind``. ``device``: "cpu" or "cuda", where the tensors are."""

    def __init__(self, kind: str, device: str, team: Team) -> None:
        self._kind, self._device, self._team = kind, device, team
        self._size = SIZES[device]

    def run(self, qualification: Qualification) -> None:
        """Make them, in the order of the table."""
        for name in ("init", "all_reduce", "messages", "state", "overlap", "abort", "stopped", "killed"):
            qualification.make(f"{self._kind}.{name}", getattr(self, f"_{name}"))
        qualification.make(f"{self._kind}.survivors", self._survivors)
        qualification.make(f"{self._kind}.newcomer", self._newcomer)

    def _init(self) -> Found:
        first = self._team.meet(self._kind)
        again = self._team.meet(self._kind)
        count = len(self._team.everybody)
        return f"{count} processes", [Measured("first", first, "s"), Measured("again", again, "s")]

    def _all_reduce(self) -> Found:
        self._team.meet(self._kind)
        return self._sums(self._team.everybody)

    def _sums(self, members: Sequence[int], size: int | None = None) -> Found:
        size, count = size or self._size, len(members)
        said = self._team.tell(dict.fromkeys(members, {"do": "all_reduce", "bytes": size, "repeats": 5}))
        _right(said, "sums")
        seconds = max(answer["seconds"] for answer in said.values())
        # Each member sends and receives 2 (n - 1) / n of the tensor, in a ring: NCCL's tests call it bus bandwidth.
        rate = 2 * (count - 1) / count * size / seconds / 1e9
        numbers = [Measured("all-reduce", seconds * 1e3, "ms"), Measured("bus bandwidth", rate, "GB/s")]
        return f"{said[members[0]]['of']} sums over {count} groups are right at each of them", numbers

    def _messages(self) -> Found:
        self._team.meet(self._kind)
        said = self._team.tell_all({"do": "messages", "bytes": self._size})
        _right(said, "numbers")
        rate = self._size / max(answer["seconds"] for answer in said.values()) / 1e9
        return "a broadcast, and messages around a ring", [Measured("broadcast", rate, "GB/s")]

    def _state(self) -> Found:
        self._team.meet(self._kind)
        return self._transferred(0, self._team.everybody[-1])

    def _transferred(self, source: int, to: int) -> Found:
        order = {"do": "state", "source": source, "to": to, "bytes": self._size}
        said = self._team.tell_all(order)
        _right({to: said[to]}, "states")
        rate = self._size / said[to]["seconds"] / 1e9
        return f"group {to} has the state of group {source}, bit for bit", [Measured("state", rate, "GB/s")]

    def _overlap(self) -> Found:
        self._team.meet(self._kind)
        width, layers = _LAYERS[self._device]
        said = self._team.tell_all({"do": "overlap", "width": width, "layers": layers, "steps": 7})
        _right(said, "gradients")
        alone, after, overlapped = (
            max(answer[way] for answer in said.values()) for way in ("alone", "after", "overlapped")
        )
        numbers = [
            Measured("step without reduction", alone * 1e3, "ms"),
            Measured("reduced after it", after * 1e3, "ms"),
            Measured("overlapped", overlapped * 1e3, "ms"),
            Measured("overlapped / without", overlapped / alone, ""),
            Measured("gradients", said[0]["bytes"] / 1e6, "MB"),
        ]
        shares = " (the groups share this machine's cores)" if self._device == "cpu" else ""
        return f"the overlapped gradients are those reduced after the step{shares}", numbers

    # --- faults -------------------------------------------------------------------------------------------------------

    def _abort(self) -> Found:
        _, waits, closed = self._pending_end(self._team.everybody[-1], None)
        return f"{len(waits)} waits ended with an error, and all processes can go on", [
            Measured("wait after the abort", _longest(waits, "since_news_s") * 1e3, "ms"),
            Measured("close", closed, "s"),
        ]

    def _stopped(self) -> Found:
        victim = self._team.everybody[-1]
        alone, waits, closed = self._pending_end(victim, signal.SIGSTOP)
        self._team.meet(self._kind)
        self._sums(self._team.everybody, MIB)
        reason = (
            f"{len(waits)} waits ended, {alone} of them before the news; once continued, the process takes part again"
        )
        return reason, [
            Measured("wait after the news", _longest(waits, "since_news_s") * 1e3, "ms"),
            Measured("close", closed, "s"),
        ]

    def _killed(self) -> Found:
        alone, waits, closed = self._pending_end(self._team.everybody[-1], signal.SIGKILL)
        longest = max((one["since_fault_s"] for one in waits.values() if one["by_itself"]), default=None)
        numbers = [] if longest is None else [Measured("wait after the kill", longest * 1e3, "ms")]
        if alone < len(waits):
            late = {member: one for member, one in waits.items() if not one["by_itself"]}
            numbers.append(Measured("wait after the news", _longest(late, "since_news_s") * 1e3, "ms"))
        numbers.append(Measured("close", closed, "s"))
        others = "" if alone == len(waits) else ", the others with the news"
        return f"{alone} of {len(waits)} waits ended by themselves{others}", numbers

    def _survivors(self) -> Found:
        survivors = self._team.everybody[:-1]
        if len(survivors) < 2:
            raise NotHere("of two groups one survives, which needs no communicator; give --groups 3 or more")
        seconds = self._team.meet(self._kind, survivors)
        reason, _ = self._sums(survivors, MIB)
        return reason, [Measured("connect", seconds, "s")]

    def _newcomer(self) -> Found:
        new = self._team.everybody[-1]
        began = time.monotonic()
        self._team.replace(new)
        self._team.whole()
        started = time.monotonic() - began
        seconds = self._team.meet(self._kind)
        reason, _ = self._transferred(0, new)
        self._sums(self._team.everybody, MIB)
        return f"{reason}, and takes part", [Measured("start", started, "s"), Measured("connect", seconds, "s")]

    def _pending_end(self, victim: int, number: signal.Signals | None) -> tuple[int, dict[int, Message], float]:
        """Leave all but ``victim`` waiting for an all-reduce, injure it, and bring the news.

        Returns the number of waits that ended before the news, what is known of each wait, and the longest time of a close.
        """
        team = self._team
        team.meet(self._kind)
        others = [member for member in team.everybody if member != victim]
        team.tell(dict.fromkeys(others, {"do": "begin", "bytes": _PENDING}))
        team.tell(dict.fromkeys(others, {"do": "mark"}))
        if number is not None:
            team.signal(victim, number)
        try:
            # Nothing ends a wait for a process that lives: it is not looked for long.
            limit_s = _ALONE_S if number is signal.SIGKILL else 0.2
            early = team.tell(dict.fromkeys(others, {"do": "ended", "limit_s": limit_s}))
            ended = team.tell(dict.fromkeys(others, {"do": "abort", "limit_s": _NEWS_S}))
        finally:
            if number is signal.SIGSTOP:
                team.signal(victim, signal.SIGCONT)
        waits = {member: {**ended[member], "by_itself": early[member]["over"]} for member in others}
        if still := [member for member in others if not waits[member]["over"]]:
            raise CheckFailed(f"{named(still)} still wait {_NEWS_S:g} s after the news")
        if done := [member for member in others if not waits[member]["error"]]:
            raise CheckFailed(f"the all-reduce counts as done in {named(done)}, and group {victim} took no part")
        left = others if number is signal.SIGKILL else team.everybody
        closed = team.tell(dict.fromkeys(left, {"do": "close"}), ABORT_TIMEOUT_S + 10.0)
        for member, said in closed.items():
            if said["stuck"]:
                team.replace(member)
        if stuck := [f"group {member}: {said['stuck']}" for member, said in closed.items() if said["stuck"]]:
            raise CheckFailed("; ".join(stuck) + "; a run replaces such a process")
        return (
            sum(early[member]["over"] for member in others),
            waits,
            max(said["seconds"] for said in closed.values()),
        )


def _right(said: Mapping[int, Message], what: str) -> None:
    """Raise ``CheckFailed`` if a member has got something wrong."""
    wrong = {member: answer for member, answer in said.items() if answer["wrong"]}
    if wrong:
        found = ", ".join(f"group {member}: {one['wrong']} of {one.get('of', 1)}" for member, one in wrong.items())
        raise CheckFailed(f"wrong {what}: {found}")


def _longest(waits: Mapping[int, Message], since: str) -> float:
    return max((max(0.0, one[since]) for one in waits.values()), default=0.0)
