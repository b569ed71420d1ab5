"""Requests to many hosts over ssh, which :mod:`.remote` answers there.

Failures assumed: a host is down, hangs or is cut off during the request. There is no answer then, but a reason.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ft.cluster.launchers.hostfile import Host
from megatron_ft.cluster.launchers.ssh import remote
from megatron_ft.errors import LaunchError

PASSED = ("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "MEGATRON_FT_")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_PARALLEL = 32
_ANSWER_S = 60.0
"""For connecting, and for starting Python from a slow file system."""
_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)
_REMEDIES = (
    ("permission denied", "let ssh log in without a password: `ssh-copy-id {login}`, or an agent with the key"),
    ("host key verification failed", "its key is unknown or has changed: run `ssh {login}` once and compare it"),
    ("could not resolve", "correct its name in the hostfile"),
    ("connection refused", "start sshd there, or add port=PORT to its line in the hostfile"),
)


@dataclass(frozen=True)
class Answer:
    """``content`` is the host's answer; None: ``reason`` says why there is none."""

    content: Mapping[str, Any] | None
    reason: str = ""


def environment(environ: Mapping[str, str], exports: Sequence[str]) -> dict[str, str]:
    """Selects the variables of this process that agents get.

    Args:
        environ: the environment of this process.
        exports: NAME, NAME=VALUE, or @FILE: a file of this user only, with lines NAME=VALUE.

    Raises:
        LaunchError: a variable is not set or has no valid name, or a file cannot be read or is readable by others.
    """
    found = {key: value for key, value in environ.items() if key in PASSED or key.startswith(PASSED_PREFIXES)}
    if "PYTHONPATH" in found:
        parts = filter(None, found["PYTHONPATH"].split(os.pathsep))
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, parts))
    lines = [line for text in exports for line in (_lines_of(Path(text[1:])) if text.startswith("@") else [text])]
    for text in lines:
        name, equals, value = text.partition("=")
        if not equals and name not in environ:
            raise LaunchError(f"--export {name}: the variable is not set here; write {name}=VALUE, or leave it out")
        if not name.isidentifier():
            raise LaunchError(f"--export {text!r} is not a variable; write NAME or NAME=VALUE")
        found[name] = value if equals else environ[name]
    return found


def _lines_of(path: Path) -> list[str]:
    """Returns the lines of the file without empty lines and comments."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o077
            lines = [line.strip() for line in file.read().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--export @{path} cannot be read: {error}") from None
    if mode:
        raise LaunchError(
            f"--export @{path}: other users have access to that file; run chmod 600 {shlex.quote(str(path))}"
        )
    return [line for line in lines if line and not line.startswith("#")]


class Connections:
    """Runs ssh. ``command``: ssh and the user's options, which have priority over those added here."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        try:
            self._ssh = shlex.split(command)
        except ValueError as error:
            raise LaunchError(f"--ssh-command {command!r}: {error}") from None
        if not self._ssh:
            raise LaunchError("--ssh-command is empty; write ssh and its options, or leave it out")
        path = environ.get("PYTHONPATH")
        own = ["env", f"PYTHONPATH={path}"] if path else []
        program = ["exec", *own, sys.executable, "-m", "megatron_ft.cluster.launchers.ssh.remote"]
        self._program = " ".join(map(shlex.quote, program))
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="megatron_ft-ssh")

    def ask(self, host: Host, request: str, patience_s: float = _ANSWER_S) -> Answer:
        """Returns within ``patience_s``. Raises ``LaunchError`` when this machine has no ssh."""
        options = [part for option in _OPTIONS for part in ("-o", option)]
        port = ["-p", str(host.port)] if host.port else []
        # -T -a -x: no terminal, no agent and no display of this machine on the other one.
        command = [*self._ssh, "-T", "-a", "-x", *options, *port, "--", host.login, self._program]
        try:
            done = subprocess.run(
                command,
                input=request,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=patience_s,
                start_new_session=True,  # so that Ctrl-C reaches the launcher only
            )
        except subprocess.TimeoutExpired:
            return Answer(None, failure(None, "", host.login, sys.executable, patience_s))
        except OSError as error:
            raise LaunchError(f"{self._ssh[0]} cannot be run ({error}); install it, or set --ssh-command") from None
        content = remote.answer(done.stdout)
        if content is not None:
            return Answer(content)
        return Answer(
            None, failure(done.returncode, done.stderr or done.stdout, host.login, sys.executable, patience_s)
        )

    def ask_all(self, requests: Mapping[Host, str]) -> dict[Host, Answer]:
        """Asks all hosts in parallel."""
        return dict(zip(requests, self._pool.map(lambda item: self.ask(*item), requests.items()), strict=True))

    def submit(self, task: Callable[[], Any]) -> Future:
        """Runs ``task`` in the background."""
        return self._pool.submit(task)

    def close(self) -> None:
        """Abandons all requests."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def failure(code: int | None, output: str, login: str, python: str, patience_s: float) -> str:
    """Returns why ssh has brought no answer, with a remedy.

    Only a few words of ``output`` are recognised, because the messages of ssh and of shells differ.

    Args:
        code: exit code of ssh; None: it was ended after ``patience_s``.
        output: everything that ssh has printed.
        login: the host and user.
        python: the Python program that was to be run there.
        patience_s: time limit of the request.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else "no message"
    if code is None:
        return f"has not answered within {patience_s:g} s; check that the host and its file systems are up"
    if code == _SSH_FAILED:
        remedies = (remedy for words, remedy in _REMEDIES if words in output.lower())
        remedy = next(remedies, "check that the host is up, and try `ssh {login} true`").format(
            login=shlex.quote(login)
        )
        return f"cannot be reached: {last}; {remedy}"
    if code in _NO_PROGRAM:
        return f"cannot run {python} ({last}); install the same Python at the same path on all hosts"
    if "No module named" in output:
        return f"lacks this megatron_ft for {python} ({last}); install the same on all hosts"
    tried = shlex.join(["ssh", login, python, "-m", "megatron_ft.cli", "--version"])
    return f"has not answered ({last}, exit code {code}); try `{tried}`"
