"""``megatron-ft doctor`` on several hosts: processes of the real command, without what takes long and is not meant."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests import support

QUICK = """
from megatron_ft.doctor import disk, everybody, guest, hub, interfaces, line, local, measure, together, versions
local.examine = lambda: [local.Finding("python", "ok", "3.11", needed=True), local.Finding("apex", "missing", "")]
line.SILENCE_S = hub.SILENCE_S = guest.SILENCE_S = 2.0
disk._SEEN_S, measure._CONNECT_S, measure._HEARD_S = 0.5, 1.0, 0.5
"""
"""A host's own findings take half a minute, and are tested by themselves."""
NO_TORCH = """
class Store:
    port = 1
    def __init__(self, bind): pass
    def close(self): pass
everybody.Store, everybody.take_part = Store, lambda *_: everybody.Outcome(everybody.REDUCED, 0.0)
"""
"""All have reduced, says everybody."""
FEWER = """
import time
whole = hub.Hub.meet
def meet(self, patience_s):
    while len(self._lines) < {there}:
        time.sleep(0.01)
    whole(self, 0.0)
hub.Hub.meet = meet
"""
"""Of host 0: when so many are there, it waits for nobody else."""
PATIENT = """
import time
frozen, measure._PINGS_S = {frozen}, 60.0
if frozen is None:  # else its peers would wait for it so long, and host 0 for them
    measure._ANSWER_S = 20.0
def silent(self):
    other = self.take.args[0] if hasattr(self.take, "args") else 0  # who is at the other end; host 0 has many lines
    limit_s = line.SILENCE_S if other == frozen else 60.0
    self._looked = line.links.listen(self._looked, self._beats, time.monotonic(), limit_s)
    return self._looked.lost
line.Line.silent = silent
"""
"""Only who is meant to be frozen is given up soon. Who stands still for a while, as on a busy machine, is waited for."""
FACTOR = "20"
"""Loopback is as fast as the processor, which others use as well."""
FREEZE = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


def command(change: str, options: Sequence[object]) -> list[str]:
    """What is run on a host, after these lines of Python."""
    code = f"{QUICK}{change}\nimport sys\nfrom megatron_ft.cli import main\nsys.exit(main())"
    return [sys.executable, "-c", code, "doctor", "--factor", FACTOR, *map(str, options)]


class Doctors:
    """One process for each host."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen] = {}

    def start(
        self, host: int, options: Sequence[object], change: str = NO_TORCH, prefix: Sequence[str] = (), **env: str
    ) -> subprocess.Popen:
        """``change``: lines of Python, run before the command. ``prefix``: what to run it with."""
        self.processes[host] = subprocess.Popen(
            [*prefix, *command(change, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=support.ROOT,
            env={**os.environ, "COLUMNS": "1000", **env},
        )
        return self.processes[host]

    def said(self, host: int) -> str:
        """Everything, once it has ended."""
        process = self.processes[host]
        output, errors = process.communicate(timeout=support.TIMEOUT_S)
        assert "Traceback" not in errors, errors
        return output + errors

    def ended(self, *hosts: int) -> tuple[str, list[int]]:
        """(what host 0 has said, the exit codes of ``hosts``, else of all)."""
        said = {host: self.said(host) for host in hosts or sorted(self.processes)}
        return said[0], [self.processes[host].returncode for host in said]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
