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
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.doctor.host_orders import Part
from megatron_ft.doctor.meeting import Channel, Message
from megatron_ft.faults import injection_points, process_lookup
from megatron_ft.qualify import device_facts
from megatron_ft.utils import lifeline, shared_file
from megatron_ft.utils.process_status import ended_with, process_status

MEMBER = [sys.executable, "-m", "megatron_ft.qualify.member_process"]
LAUNCH = [sys.executable, "-m", "megatron_ft"]
_END_S = 20.0
"""Time in which a launcher that was told to stop ends."""
_SILENT_S = 900.0
"""Longest time without an order of host 0: that of a training run."""
_SHOWN = 15
_INJECTOR_S = 120.0
_LOOK_S = 0.05


class _Member:
    def __init__(self, env: Mapping[str, str]) -> None:
        own, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [*MEMBER, str(os.getpid()), str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                pass_fds=[its.fileno()],
            )
        self._channel = Channel(own)
        self._said: list[str] = []
        threading.Thread(target=_read, args=(self.process.stdout, self._said.append), daemon=True).start()

    def tell(self, order: Message) -> None:
        with contextlib.suppress(OSError):  # it has ended; its answer says so
            self._channel.send(order)

    def answer(self, deadline: float) -> Message:
        try:
            return self._channel.receive(max(_LOOK_S, deadline - time.monotonic()))
        except TimeoutError:
            return {"silent": True}
        except OSError:
            code = self.process.wait(_END_S)
            last = next((line.strip() for line in reversed(self._said) if line.strip()), "")
            return {"ended": f"its process {ended_with(code)}" + (f": {last}" if last else "")}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_END_S)
        self._channel.close()


class HostPart(Part):
    """Carries out the orders of host 0."""

    failures = (OSError, subprocess.SubprocessError)
    lost_code = 2
    silent_s = _SILENT_S

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._launcher: subprocess.Popen[str] | None = None
        self._printed: list[str] = []
        self._injector: subprocess.Popen[str] | None = None
        self._injector_says = Path()

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

    def launch(self, words: Sequence[str], env: Mapping[str, str]) -> Message:
        """Start this host's agent of a training run."""
        self._printed = []
        self._launcher = _command(words, env, subprocess.PIPE, subprocess.STDOUT)
        threading.Thread(target=_read, args=(self._launcher.stdout, self._printed.append), daemon=True).start()
        return {}

    def housed(self, run_dir: str) -> Message:
        """Say which groups have a living rank that this host's agent has started."""
        launcher = self._launcher
        assert launcher is not None
        found = process_lookup.ranks(Path(run_dir))
        return {"groups": [rank.group for rank in found if process_status(rank.pid).parent == launcher.pid]}

    def inject(self, run_dir: str, fault: Message) -> Message:
        """Begin to inject a fault into a rank of this host; return when the rank knows."""
        directory = Path(run_dir)
        schedule = directory.with_suffix(f".fault.{fault['step']}.json")
        shared_file.write_json(schedule, {"faults": [fault]})
        self._injector_says = schedule.with_suffix(".log")
        with shared_file.append_to(self._injector_says) as says:
            # It knows the groups of this host only, and there may be one; others live, as one fault follows the other.
            words = ["inject", run_dir, str(schedule), "--min-survivors", "0"]
            self._injector = _command(words, {}, says.fileno(), subprocess.STDOUT)
        order = injection_points.mailbox(directory, fault["group"], 0)
        deadline = time.monotonic() + _INJECTOR_S
        while not order.exists():
            if time.monotonic() > deadline or self._injector.poll() is not None:
                why = self._injector_said()
                return {"failed": f"megatron-ft inject has given no order to group {fault['group']}: {why}"}
            time.sleep(_LOOK_S)
        return {}

    def injected(self, limit_s: float) -> Message:
        """Wait for the end of the injection, which a stopped rank's continuation is a part of."""
        assert self._injector is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return {"done": self._injector.wait(limit_s) == 0, "said": self._injector_said()}
        return {"done": False, "said": self._injector_said()}

    def _injector_said(self) -> str:
        """Return what has become of the fault. A table of all faults follows, or nothing where the command ended early."""
        lines = self._injector_says.read_text().splitlines()
        end = next((number for number, line in enumerate(lines) if "faults injected" in line), len(lines))
        return lines[end - 1] if end else ""

    def finish(self, limit_s: float) -> Message:
        """Wait for the end of the training run; end it after ``limit_s``. ``code`` is None then."""
        assert self._launcher is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._launcher.wait(limit_s)
        self._end_launcher()
        return {"code": code, "said": "".join(self._printed[-_SHOWN:])}

    def dismiss(self) -> Message:
        """End the members."""
        for member in self._members.values():
            member.kill()
        self._members = {}
        return {}

    def leave(self) -> None:
        """End every process."""
        self.dismiss()
        self._end_launcher()

    def _end_launcher(self) -> None:
        for process in (self._injector, self._launcher):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(_END_S)
        self._injector = self._launcher = None


def _command(words: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> subprocess.Popen[str]:
    """Start ``megatron-ft`` with these words; it is told to stop when this process ends."""
    me = os.getpid()
    return subprocess.Popen(
        [*LAUNCH, *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, **env},
        preexec_fn=lambda: lifeline.end_with(me, signal.SIGTERM),
    )


def _read(stream: Any, take: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            take(line)
