"""Which hosts can take an agent that is started over ssh, and what the others need: decisions only.

Intuition. A run that is started on many hosts and fails on one keeps all others waiting for minutes. So each is asked first,
and whoever cannot be reached, or lacks something, is named with what to do about it.

Assumes: what ssh and shells print is for people and differs; only a few words of it are recognised, the rest is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wanted:
    """What every host has to have: the same ``versions`` by name, the working ``directory``, the ``script`` and ``config``
    in it, and a ``run_dir`` that all share."""

    versions: Mapping[str, str]
    directory: str
    run_dir: str
    script: str
    config: str


def lacks(wanted: Wanted, answer: Mapping[str, Any], name: str) -> str:
    """What the host called ``name``, which has answered, lacks; "" if it is ready."""
    theirs = answer["versions"]
    other = [f"{what} {theirs.get(what)}, not {mine}" for what, mine in wanted.versions.items() if theirs.get(what) != mine]
    if other:
        return f"has {' and '.join(other)}; install the same on all hosts"
    if not answer["directory"]:
        return f"has no directory {wanted.directory}; start from one that all hosts have"
    for path in (wanted.script, wanted.config):
        if path not in answer["files"]:
            return f"has no {path} in {wanted.directory}; copy it there, or start from a directory that all hosts share"
    if not answer["shared"]:
        return f"does not see what is written to --run-dir {wanted.run_dir} here; name a directory that all hosts share"
    if answer["address"] is None:
        said = ", ".join(answer["tried"]) or "nothing"
        return (
            f"has no address that the others could reach it by: {name} stands for {said}; write address=ADDR after it in "
            f"the hostfile"
        )
    return ""


_SSH_FAILED = 255
_NO_PROGRAM = (126, 127)
_CURES = (
    ("permission denied", "ssh must not ask for a password: `ssh-copy-id {login}`, or an agent with the key"),
    ("host key verification failed", "its key is not known, or has changed: `ssh {login}` once by hand, and compare it"),
    ("could not resolve", "no such host: correct the hostfile"),
    ("connection refused", "no sshd there: start it, or write port=PORT in the hostfile"),
    ("timed out", "is it up, and is there a way to it?"),
    ("no route to host", "is it up, and is there a way to it?"),
    ("unreachable", "is it up, and is there a way to it?"),
)


def unreachable(code: int | None, said: str, login: str, python: str, patience_s: float) -> str:
    """Why there is no answer. ``code``: ssh's exit code, None when it was not waited for any longer; ``said``: what it has
    printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else "it says nothing"
    if code is None:
        return f"has not answered within {patience_s:g} s; is it up, and are its file systems?"
    if code == _SSH_FAILED:
        low = said.lower()
        cure = next((cure for word, cure in _CURES if word in low), "try `ssh {login} true`")
        return f"is not reached: {last}; {cure.format(login=login)}"
    if code in _NO_PROGRAM:
        return f"cannot run {python} ({last}); all hosts need the same Python at the same path"
    if "No module named" in said:
        return f"has no megatron_ft like this one for {python} ({last}); install the same on all hosts"
    return f"has not answered ({last}, exit code {code}); try `ssh {login} {python} -m megatron_ft.cli --version`"
