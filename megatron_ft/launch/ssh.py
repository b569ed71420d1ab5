"""Requests to many hosts at once over ssh (``launch.far`` answers them). Nothing is decided here.

Failures it assumes: a host is down, hangs or is cut off in the middle of it; then it has no answer, and the reason is said.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron_ft.core import ready
from megatron_ft.errors import LaunchError
from megatron_ft.launch import far
from megatron_ft.launch.hostfile import Host

PASSED = ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "MEGATRON_FT_")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_AT_ONCE = 32
_ANSWER_S = 60.0
"""A connection, and a Python from a slow file system."""


@dataclass(frozen=True)
class Answer:
    """Of one host: what it ``said``, or ``why`` it has not."""

    said: Mapping[str, Any] | None
    why: str = ""


def environment(environ: Mapping[str, str], exports: Sequence[str]) -> dict[str, str]:
    """What agents get of this process' environment. ``exports``: NAME or NAME=VALUE. Raises ``LaunchError``."""
    found = {key: value for key, value in environ.items() if key in PASSED or key.startswith(PASSED_PREFIXES)}
    if "PYTHONPATH" in found:
        parts = filter(None, found["PYTHONPATH"].split(os.pathsep))
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, parts))
    for text in exports:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise LaunchError(f"--export {name}: it is not set here; write {name}=VALUE, or leave it out")
        if not name.isidentifier():
            raise LaunchError(f"--export {text!r} is no variable; write NAME or NAME=VALUE")
        found[name] = value if equals else environ[name]
    return found


class Connections:
    """To ``hosts``. ``command``: ssh and options of the user's, which win over ours."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        try:
            self._ssh = shlex.split(command)
        except ValueError as error:
            raise LaunchError(f"--ssh-command {command!r}: {error}") from None
        if not self._ssh:
            raise LaunchError("--ssh-command is empty; write ssh and its options, or leave it out")
        path = environ.get("PYTHONPATH")
        own = ["env", f"PYTHONPATH={path}"] if path else []
        self._far = " ".join(map(shlex.quote, ["exec", *own, sys.executable, "-m", "megatron_ft.launch.far"]))
        self._clients: set[subprocess.Popen] = set()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="megatron_ft-ssh")

    def ask(self, host: Host, request: str, patience_s: float = _ANSWER_S) -> Answer:
        """One request; returns after ``patience_s`` at the latest. Raises ``LaunchError`` when there is no ssh here."""
        options = [part for option in _OPTIONS for part in ("-o", option)]
        port = ["-p", str(host.port)] if host.port else []
        # No terminal, no agent and no display of ours on the other side.
        command = [*self._ssh, "-T", "-a", "-x", *options, *port, "--", host.login, self._far]
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # Ctrl-C is for us.
            client = subprocess.Popen(command, **ends, text=True, errors="replace", start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{self._ssh[0]} cannot be run ({error}); install it, or name it by --ssh-command") from None
        self._clients.add(client)
        with client:
            try:
                output, errors = client.communicate(request, patience_s)
                code, said = client.returncode, far.answer(output)
            except subprocess.TimeoutExpired:
                client.kill()
                code, said, output, errors = None, None, "", ""
            finally:
                self._clients.discard(client)
        if said is not None:
            return Answer(said)
        return Answer(None, ready.unreachable(code, errors or output, host.login, sys.executable, patience_s))

    def ask_all(self, requests: Mapping[Host, str], patience_s: float = _ANSWER_S) -> dict[Host, Answer]:
        """All at once."""
        return dict(zip(requests, self._pool.map(lambda item: self.ask(*item, patience_s), requests.items()), strict=True))

    def later(self, what: Callable[[], Any]) -> Future:
        """In the background."""
        return self._pool.submit(what)

    def close(self) -> None:
        """Nobody waits for what is still asked for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in tuple(self._clients):
            client.kill()
