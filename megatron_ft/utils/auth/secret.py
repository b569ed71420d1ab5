"""The secret of a run: a process that has it belongs to the run, every other process is a stranger.

It is 256 random bits, written by the agent of host 0 to ``RUN_DIR/secret`` with mode 0600. Agents of other hosts and later
commands (``stop``, ``leave``, ``join``, ``inject``) read it there; ranks get it from their agent in the environment
variable ``MEGATRON_FT_SECRET``. It never travels over a connection and is never an argument of a process. Where hosts share
no directory, the user sets that variable to the same value on all of them; then it is used instead of the file.

Every use has a key of its own, derived from the secret and a purpose, so that a MAC of one use is invalid in another.
docs/security.md lists what is authenticated with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.errors import LaunchError
from megatron_ft.utils import shared_file

VARIABLE = "MEGATRON_FT_SECRET"
FILE = "secret"
"""The file's name in the run directory."""
MAC_BYTES = 16
"""HMAC-SHA256 is cut to 128 bits where it travels with every message."""
_LEAST = 32
_LOOK_S = 0.2


class Key:
    """A key for one purpose. ``repr`` does not show it."""

    __slots__ = ("_bytes",)

    def __init__(self, key: bytes) -> None:
        self._bytes = key

    def of(self, *purpose: str) -> Key:
        """The key for a narrower purpose, e.g. ``of("copies", run_id)``."""
        return Key(self.mac(b"key", *(part.encode() for part in purpose)))

    def mac(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the parts, 32 bytes; different parts never give the same message."""
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._bytes, message, "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._bytes, other._bytes)

    def __hash__(self) -> int:
        return hash(hashlib.sha256(self._bytes).digest())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class Secret(Key):
    """The root of all keys of a run. ``text``: its form in the file and the environment variable."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        super().__init__(text.encode())

    @property
    def text(self) -> str:
        return self._bytes.decode()

    @classmethod
    def new(cls) -> Secret:
        return cls(secrets.token_hex(32))


def here() -> Secret:
    """Return the secret of this process, which the launcher has started. Raises ``LaunchError`` in any other process."""
    found = given()
    if found is None:
        raise LaunchError(
            f"{VARIABLE} is not set; only processes that `megatron-ft launch` has started, or that read the secret of a run "
            f"directory, can talk to a run"
        )
    return found


def given(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """Return the environment variable's secret; None where it is not set. Raises ``LaunchError`` if it is too short."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    return _checked(text, VARIABLE)


def make(run_dir: Path, environ: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of a run that begins in ``run_dir``, which must exist; for the agent of host 0.

    An existing secret is used again: a host that was started earlier may have read it. Raises ``LaunchError``.
    """
    wanted = given(environ)
    with contextlib.suppress(FileNotFoundError):
        found = _read(run_dir)
        if wanted in (None, found):
            return found
    made = wanted or Secret.new()
    try:
        shared_file.write(run_dir / FILE, made.text + "\n", mode=0o600)
        return _read(run_dir)
    except OSError as error:
        raise LaunchError(f"{run_dir / FILE} cannot be written ({error}); choose another --run-dir") from None


def load(run_dir: Path, patience_s: float = 0.0, environ: Mapping[str, str] = os.environ) -> Secret:
    """Return the secret of the run in ``run_dir``, waiting for it up to ``patience_s``. Raises ``LaunchError``."""
    wanted = given(environ)
    deadline = time.monotonic() + patience_s
    while wanted is None:
        try:
            return _read(run_dir)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"{run_dir / FILE} does not exist; give the --run-dir of a run, or set {VARIABLE} to the same value on "
                    f"all hosts where they share no directory"
                ) from None
        time.sleep(_LOOK_S)
    return wanted


def _read(run_dir: Path) -> Secret:
    """Read the file. Raises ``FileNotFoundError``, and ``LaunchError`` if other users can read it or have put it there."""
    path = run_dir / FILE
    try:
        with open(shared_file.open_file(path, os.O_RDONLY), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        raise
    except shared_file.Refused as error:
        raise LaunchError(
            f"{error.strerror}, and start the run again. Another user who knows the secret could take part in the run"
        ) from None
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read ({error.strerror}); only the user who has started the run may ask it for anything"
        ) from None
    if mode & 0o077:
        raise LaunchError(
            f"{path} has mode {mode:04o}; only its owner, who is the run's, may read it. Delete it and start the run again; "
            f"where files have no permissions, set {VARIABLE} instead"
        )
    return _checked(text, str(path))


def _checked(text: str, where: str) -> Secret:
    if len(text) < _LEAST or not text.isascii() or not text.isprintable() or " " in text:
        raise LaunchError(
            f"{where} holds {len(text)} characters; a secret has at least {_LEAST}, random, e.g. from `openssl rand -hex 32`"
        )
    return Secret(text)
