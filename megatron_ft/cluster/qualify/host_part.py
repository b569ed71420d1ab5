"""One host's part of a qualification: it starts processes, hands orders to them, signals them, and ends them all.

Every process is a child of this one and ends with it: the kernel kills members and tells launchers to stop when this
process ends in any way. Failures it assumes: a process ends, is stopped or hangs at any moment; host 0 is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron_ft.cluster.doctor.host_orders import Part
from megatron_ft.cluster.doctor.meeting import Channel, Message
from megatron_ft.cluster.faults import kill, process_lookup
from megatron_ft.cluster.qualify import device_facts
from megatron_ft.utils import lifeline
from megatron_ft.utils.process_status import ended_with, process_status

MEMBER = [sys.executable, "-m", "megatron_ft.cluster.qualify.member_process"]
LAUNCH = [sys.executable, "-m", "megatron_ft"]
_END_S = 20.0
"""Time in which a launcher that was told to stop ends."""
_SILENT_S = 900.0
"""Longest time without an order of host 0: that of a training run."""
_STOP_S = 4.0
"""How long a rank stays stopped whose fault is a stop."""
_LOOK_S = 0.01
"""The agents give a rank up that has been stopped for ``stopped_timeout_s`` (0.25 s)."""


class _Member:
    def __init__(self, env: Mapping[str, str]) -> None:
        own, its = socket.socketpair()
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # closed in kill
        with its:
            self.process = subprocess.Popen(
                [*MEMBER, str(os.getpid()), str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                pass_fds=[its.fileno()],
            )
        self._channel = Channel(own)

    def tell(self, order: Message) -> None:
        with contextlib.suppress(OSError):  # it has ended; its answer says so
            self._channel.send(order)

    def answer(self, deadline: float) -> Message:
        try:
            return self._channel.receive(max(_LOOK_S, deadline - time.monotonic()))
        except TimeoutError:
            return {"failed": "no answer in time", "lost": True}
        except OSError:
            code = self.process.wait(_END_S)
            why = ": ".join([f"its process {ended_with(code)}", *_last_lines(self._output, 1)])
            return {"failed": why, "lost": True}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_END_S)
        self._channel.close()
        self._output.close()


class HostPart(Part):
    """Carries out the orders of host 0."""

    failures = (OSError, subprocess.SubprocessError)
    lost_code = 2
    silent_s = _SILENT_S

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}

    def facts(self) -> Message:
        """Say what this host has."""
        return device_facts.facts()

    def start(self, members: Mapping[str, Mapping[str, str]]) -> Message:
        """Start the members that are given with their variables."""
        for member, env in members.items():
            if (before := self._members.get(int(member))) is not None:
                before.kill()
            self._members[int(member)] = _Member(env)
        return {}

    def members(self, orders: Mapping[str, Message], limit_s: float) -> Message:
        """Give each member its order, all at the same time, and return their answers."""
        deadline = time.monotonic() + limit_s
        for member, order in orders.items():
            self._members[int(member)].tell(order)
        return {member: self._members[int(member)].answer(deadline) for member in orders}

    def signal(self, member: int, number: int) -> Message:
        """Send a signal to one member."""
        self._members[member].process.send_signal(signal.Signals(number))
        if number == signal.SIGKILL:
            self._members[member].process.wait(_END_S)
        return {}

    def train(
        self, words: Sequence[str], env: Mapping[str, str], run_dir: str, faults: Sequence[Message], limit_s: float
    ) -> Message:
        """Run this host's agent of a training run to its end, and carry out the faults of its ranks; end it after
        ``limit_s``. ``code`` is None then."""
        me, deadline, waiting = os.getpid(), time.monotonic() + limit_s, list(faults)
        with tempfile.TemporaryFile() as output:
            launcher = subprocess.Popen(
                [*LAUNCH, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                preexec_fn=lambda: lifeline.end_with(me, signal.SIGTERM),
            )
            try:
                while launcher.poll() is None and time.monotonic() < deadline:
                    waiting = [fault for fault in waiting if not _struck(Path(run_dir), fault, launcher.pid)]
                    time.sleep(_LOOK_S)
                code = launcher.poll()
            finally:
                _end(launcher)
            return {"code": code, "said": " / ".join(_last_lines(output, 2))}

    def dismiss(self) -> Message:
        """End the members."""
        for member in self._members.values():
            member.kill()
        self._members = {}
        return {}

    def leave(self) -> None:
        self.dismiss()


def _struck(run_dir: Path, fault: Message, agent: int) -> bool:
    """Kill the rank of a fault, or let it go on after a while, if it is one of this agent's and has stopped itself at the
    fault's point. Return whether it was struck."""
    rank = process_lookup.find(run_dir, fault["group"])
    if rank is None or not rank.is_stopped or process_status(rank.pid).parent != agent:
        return False
    number = signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP
    kill.kill(run_dir, fault["group"], f"{fault['point']}, step {fault['step']}", number)
    if number is signal.SIGSTOP:  # not waited for: the next fault may come meanwhile
        resume = threading.Timer(_STOP_S, rank.send, (signal.SIGCONT,))
        resume.daemon = True
        resume.start()
    return True


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher with its ranks, if it has not ended."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_END_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait(_END_S)


def _last_lines(output: BinaryIO, count: int) -> list[str]:
    """Return what a process that has ended said at last."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    return [line for line in lines if line][-count:]
