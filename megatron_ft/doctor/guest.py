"""Every host's part in the check of all hosts, host 0's own as well: do what host 0 asks for, and say what was found.

Failures it assumes: host 0 is not there, ends, freezes or is cut off; then this host says so and ends.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_ft.doctor import disk, everybody, interfaces, local, meeting, versions
from megatron_ft.doctor.line import SILENCE_S, Line, Message
from megatron_ft.doctor.measure import Peer, Service
from megatron_ft.doctor.meeting import Meeting

_LOOK_S = 0.1


def attend(where: Meeting) -> tuple[int, str]:
    """Until host 0 has said how it ends: (exit code, the line that says so). Raises ``LaunchError`` if it is not wanted."""
    services: list[Service] = []

    def hello(own: str) -> Message:
        for earlier in services:  # of an attempt that came to nothing
            earlier.close()
        services[:] = [Service(own, where.rank)]
        port, ear = services[0].ports
        card = {"name": socket.gethostname(), "address": own, "port": port, "ear": ear}
        return {"hello": where.rank, "hosts": where.hosts, "job": where.job, "card": card}

    reached = meeting.reach(where, hello)
    if isinstance(reached, str):
        return 1, reached
    line, welcome = reached
    services[0].token = welcome["token"].encode()
    try:
        return _Guest(where, line, welcome["own"], services[0]).serve()
    finally:
        line.close()
        services[0].close()


class _Guest:
    def __init__(self, where: Meeting, line: Line, address: str, service: Service) -> None:
        self._where, self._line, self._address, self._service = where, line, address, service
        self._parts: dict[str, Callable[[Message], dict[str, Any]]] = {
            "look": self._look,
            "clock": lambda order: {"time": time.time()},
            "call": self._call,
            "disk": self._disk,
            "reduce": self._reduce,
        }

    def serve(self) -> tuple[int, str]:
        """One order after the other."""
        while True:
            try:
                order = self._line.next(_LOOK_S)
            except queue.Empty:
                if self._line.silent():
                    return 1, f"host 0 ({self._line.peer}) has been silent for {SILENCE_S:g} s: it is frozen, or cut off"
                continue
            if order is None:
                return 1, f"host 0 ({self._line.peer}) has ended before the check was over; see what it says"
            if "end" in order:
                return order["end"], order["line"]
            answer = self._parts[order["do"]](order)
            self._line.send({"number": order["number"], **answer})

    def _look(self, order: Message) -> dict[str, Any]:
        findings = local.examine()
        nccl = any(finding.what == "NCCL" and finding.state == local.OK for finding in findings)
        return {
            "findings": [asdict(finding) for finding in findings],
            "versions": versions.here(findings),
            "interfaces": [asdict(finding) for finding in interfaces.examine(self._address, nccl)],
            "nccl": nccl,
        }

    def _call(self, order: Message) -> dict[str, Any]:
        return self._service.measure(Peer(**order["peer"]), order["measure"], order["fully"]).to_json()

    def _disk(self, order: Message) -> dict[str, Any]:
        directory = self._where.directory
        if directory is None:
            return {"trouble": "no --directory is given here, but on host 0"}
        return disk.try_out(directory, order["token"])

    def _reduce(self, order: Message) -> dict[str, Any]:
        return everybody.take_part(order, self._address, lambda: self._line.stopped == order["number"]).to_json()
