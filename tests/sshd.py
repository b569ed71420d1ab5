"""Hosts with a real sshd each, in network namespaces, and one more to start from. Keys and settings are the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import netlab
from tests.stores import await_

SSHD = "/usr/sbin/sshd"
_SSHD_CONFIG = """
HostKey {directory}/host
AuthorizedKeysFile {directory}/user.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
"""
_SSH_CONFIG = """
Host *
IdentityFile {directory}/user
IdentitiesOnly yes
UserKnownHostsFile {directory}/known
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""


def require() -> None:
    """Skip the calling test where there can be no such hosts."""
    netlab.require()
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        pytest.skip("ssh needs sshd and ssh (Debian: openssh-server)")


class Lab(netlab.Lab):
    """``hosts`` namespaces with an sshd each; the last namespace, ``start``, has none. All see this machine's files."""

    def __init__(self, directory: Path, hosts: int) -> None:
        super().__init__(hosts + 1)
        self.start, self.directory = hosts, directory
        self._sshds: list[subprocess.Popen] = []
        os.makedirs("/run/sshd", exist_ok=True)  # sshd needs this directory, which only its service makes
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
        public = (directory / "host.pub").read_text()
        (directory / "known").write_text(f"10.99.0.* {public}fd99::* {public}")
        for name, text in (("sshd_config", _SSHD_CONFIG), ("ssh_config", _SSH_CONFIG)):
            (directory / name).write_text(text.format(directory=directory))

    @property
    def ssh(self) -> str:
        """Return the value of ``--ssh-command``."""
        return f"ssh -F {self.directory}/ssh_config"

    def begin(self, host: int, *first: str) -> None:
        """Start the sshd of a host, in a mount namespace of its own in which a shell runs ``first`` before."""
        said = (self.directory / f"sshd{host}.log").open("ab")
        # The user's own start file may wait: pyenv's for a lock, which a login that a test kills can leave behind.
        without = "[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc"
        script = "; ".join(["set -e", without, *first, f"exec {SSHD} -D -e -f {self.directory}/sshd_config"])
        self._sshds.append(
            subprocess.Popen(self.inside(host, ["sh", "-c", script]), stdin=subprocess.DEVNULL, stderr=said)
        )
        await_(lambda: self._listens(host), f"sshd of host {host} listens")

    def _listens(self, host: int) -> bool:
        done = subprocess.run(self.inside(host, ["ss", "-Hltn", "sport = :22"]), capture_output=True, text=True)
        return bool(done.stdout.strip())

    def close(self) -> None:
        """End every process that was started here, also those whose parent is gone."""
        for host in self.hosts:
            self.kill_all(host)
        for sshd in self._sshds:
            sshd.wait()
        super().close()
