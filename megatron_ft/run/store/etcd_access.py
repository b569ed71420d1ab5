"""How a client gets access to an etcd: TLS with its certificates, and the user's password.

Failures it assumes: a file is missing or wrong, and the error names it; files are replaced while the run goes on
(short-lived certificates), and new connections then use the new ones; etcd forgets a token, and the client gets another one.
"""

from __future__ import annotations

import os
import shlex
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.config.store_address import PASSWORD_VARIABLE, EtcdAddress
from megatron_ft.errors import StoreError

Post = Callable[[str, dict[str, Any]], dict[str, Any]]


class Refused(StoreError):
    """etcd cannot be used with these settings, or understood a request and will not carry it out. A retry is of no use."""


class Access:
    """The certificates and the user that an address names. Several clients may share one.

    Raises ``Refused`` for a file that cannot be used.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self.address = address
        self.header: dict[str, str] = {}
        """The headers that authorise a request; empty without a user, and until :meth:`log_in`."""
        self.worked = False
        """True once a node has answered a client that uses this."""
        self._made: tuple[Any, ssl.SSLContext] | None = None
        if address.tls:
            self.context()
        if address.user:
            self._password()

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None without TLS. Changed files are read again, if they can be."""
        address = self.address
        if not address.tls:
            return None
        files = [path for path in (address.ca, address.cert, address.key) if path]
        try:
            stamp = [(os.stat(path).st_ino, os.stat(path).st_mtime_ns) for path in files]
            if self._made is None or self._made[0] != stamp:
                self._made = (stamp, self._context())
        except (OSError, Refused) as error:
            if self._made is None:
                raise error if isinstance(error, Refused) else _unreadable(error) from None
        return self._made[1]

    def _context(self) -> ssl.SSLContext:
        address = self.address
        try:
            context = ssl.create_default_context(cafile=address.ca or None)
        except ssl.SSLError:
            raise Refused(f"the store's ca {address.ca} holds no certificate; give a file in PEM form") from None
        if address.cert:
            try:
                context.load_cert_chain(address.cert, address.key, password=_no_passphrase)
            except ssl.SSLError as error:
                raise Refused(
                    f"the store's cert {address.cert} and key {address.key} do not fit together ({error.reason or error}); "
                    f"give a certificate and its own key, both in PEM form and without a passphrase"
                ) from None
        return context

    def log_in(self, post: Post) -> None:
        """Ask etcd for a token, if there is a user. Raises ``Refused`` and what ``post`` raises."""
        if not self.address.user:
            return
        where = self.address.password_file or PASSWORD_VARIABLE
        try:
            answer = post("/v3/auth/authenticate", {"name": self.address.user, "password": self._password()})
        except Refused as error:
            raise Refused(
                f"etcd does not let user {self.address.user!r} in with the password of {where} ({error}); correct the user "
                f"or the password, or leave the user out if this etcd has no authentication"
            ) from None
        self.header = {"Authorization": answer["token"]}

    def _password(self) -> str:
        file, user = self.address.password_file, self.address.user
        if not file:
            if PASSWORD_VARIABLE not in os.environ:
                raise Refused(
                    f"the store's user is {user!r} and there is no password; give password_file=FILE, of mode 0600, or "
                    f"{PASSWORD_VARIABLE} in the environment of all hosts"
                )
            return os.environ[PASSWORD_VARIABLE]
        try:
            mode = stat.S_IMODE(os.stat(file).st_mode)
            if mode & 0o077:
                raise Refused(
                    f"the store's password_file {file} has mode {mode:04o}; others can read it: run chmod 600 "
                    f"{shlex.quote(str(file))}"
                )
            return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(error, file) from None


def refusal(error: ssl.SSLError, address: EtcdAddress) -> str:
    """Return the cause and the remedy of a TLS error, for a message."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        ca = address.ca or "the system's CA certificates"
        return (
            f"its certificate is not valid here ({error.verify_message}); it has to be signed by {ca}, which ca= names, and "
            f"issued for the name or address by which the store setting names that node"
        )
    if "ALERT" in reason:
        own = f"the certificate {address.cert}" if address.cert else "a client without a certificate"
        return f"it refuses {own} ({reason}); give cert= and key= of one that its --trusted-ca-file has signed"
    return f"it does not speak TLS ({reason}); use etcd:// in place of etcds://, or start it with TLS"


def _unreadable(error: Exception, file: str = "") -> Refused:
    name = file or getattr(error, "filename", None) or "a file"
    why = getattr(error, "strerror", None) or error
    return Refused(f"the store's file {name} cannot be read here ({why}); it has to be there on every host")


def _no_passphrase() -> str:
    """Return an empty passphrase, in place of OpenSSL's question on the terminal."""
    return ""
