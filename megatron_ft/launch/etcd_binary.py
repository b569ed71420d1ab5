"""The etcd that is installed here, for who starts one. No torch here: the doctor asks, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from megatron_ft.core import quorum
from megatron_ft.errors import LaunchError

VARIABLE = "MEGATRON_FT_ETCD"
"""Names another etcd than the one on PATH."""
INSTALL = "as root: apt-get install etcd-server"
_LEAST = (3, 4)
_VERSION_S = 20.0


class EtcdMissing(LaunchError):
    """There is none."""


class EtcdUnusable(LaunchError):
    """There is one, and ``remedy`` says what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def find() -> tuple[str, str]:
    """Its path, and its version. Raises ``EtcdMissing`` or ``EtcdUnusable``."""
    named = os.environ.get(VARIABLE)
    found = shutil.which(named or "etcd")
    if found is None:
        raise EtcdMissing(f"{VARIABLE} is {named!r}, which is no program" if named else "no etcd on PATH")
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=_VERSION_S, env=environment())
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EtcdUnusable(str(error), f"reinstall; {INSTALL}") from None
    version = re.search(r"etcd Version: (\d+)\.(\d+)\S*", done.stdout)
    if done.returncode or version is None:
        trouble = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        raise EtcdUnusable(trouble, f"reinstall; {INSTALL}")
    if (int(version[1]), int(version[2])) < _LEAST:
        raise EtcdUnusable(f"{version[0]} has no /v3 gateway", "etcd 3.4 or newer")
    return found, version[0].removeprefix("etcd Version: ")


def environment() -> dict[str, str]:
    """For etcd: nothing of ours shall come from its own variables, and no proxy stands between members."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    return {name: value for name, value in kept.items() if not name.startswith("ETCD_") or "UNSUPPORTED" in name}


def check(hosts: int, rank: int | None) -> None:
    """Whether ``hosts`` (spare ones not counted) can have a store of their own; ``rank``: this one, if it is one of them.

    Before anything is started. Raises ``LaunchError``.
    """
    if hosts < quorum.SIZE:
        raise LaunchError(
            f'fault_tolerance.store is "etcd" and there are {hosts} hosts (spare ones do not count); its {quorum.SIZE} '
            f'members need a host each: use {quorum.SIZE} hosts or more, or "embedded", or "etcd://..." with one that runs'
        )
    if rank is None or rank < quorum.SIZE:
        try:
            find()
        except EtcdMissing as error:
            raise LaunchError(_unusable(str(error), INSTALL)) from None
        except EtcdUnusable as error:
            raise LaunchError(_unusable(str(error), error.remedy)) from None


def _unusable(why: str, remedy: str) -> str:
    return (
        f'fault_tolerance.store is "etcd", and this host can start none: {why}. On the first {quorum.SIZE} hosts, and on '
        f"those that are to replace them: {remedy}, or name the program in {VARIABLE}"
    )
