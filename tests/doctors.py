"""``megatron-ft doctor`` on several hosts: processes of the real command, without the slow local check."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests import support

QUICK = """
from megatron_ft.cluster.doctor import bandwidth, disk, host_orders, hosts_check, local, versions
local.examine = lambda: [local.Finding("python", "ok", "3.11", needed=True), local.Finding("apex", "missing", "")]
hosts_check._ANSWER_S, host_orders._HELLO_S, disk._VISIBLE_S = 60.0, 60.0, 0.5
"""
"""The local check takes half a minute and has its own tests. On a busy machine a host may answer late."""
FEWER = """
import time
whole = host_orders.Hub.wait
def wait(self, patience_s):
    while len(self._channels) < {there}:
        time.sleep(0.01)
    whole(self, 0.0)
host_orders.Hub.wait = wait
"""
"""A change for host 0: it stops waiting for others when {there} hosts have connected."""
FACTOR = "20"
"""The rate over loopback depends on the processor, which other processes use as well."""
FREEZE = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


def command(change: str, options: Sequence[object]) -> list[str]:
    """Return the command line of doctor, preceded by these lines of Python."""
    code = f"{QUICK}{change}\nimport sys\nfrom megatron_ft.cli import run_and_exit\nrun_and_exit()"
    return [sys.executable, "-c", code, "doctor", "--factor", FACTOR, *map(str, options)]


class Doctors:
    """One process for each host."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen] = {}

    def start(
        self, host: int, options: Sequence[object], change: str = "", prefix: Sequence[str] = (), **env: str
    ) -> subprocess.Popen:
        """``change``: lines of Python that run before the command. ``prefix``: command that runs it."""
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
        """Return the whole output, after the process has ended."""
        process = self.processes[host]
        output, errors = process.communicate(timeout=support.TIMEOUT_S)
        assert "Traceback" not in errors, errors
        return output + errors

    def ended(self, *hosts: int) -> tuple[str, list[int]]:
        """Return the output of host 0 and the exit codes of ``hosts`` (default: all)."""
        said = {host: self.said(host) for host in hosts or sorted(self.processes)}
        return said[0], [self.processes[host].returncode for host in said]

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
